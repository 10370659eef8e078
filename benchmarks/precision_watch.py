"""What a precision_watch costs: the same steps without and with samples, turn by turn in one process; prints JSON.

python benchmarks/precision_watch.py --gin_file=resnet_cpu.gin --rounds=8

A round times some plain steps and then one sample, so that a machine that others use slows both. What `every` steps
between samples cost is the time of a sample over that of so many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def measure(options: argparse.Namespace) -> dict:
    from launcher.config import gin_bindings
    from launcher.reporting.reporter import Reporter
    from launcher.run import loading, session
    from launcher.run.actions.precision_watch import PrecisionWatch, Watch
    from launcher.run.recipe import Recipe

    loading.import_builtins()
    gin_bindings.load([options.gin_file], options.gin_param)
    built = session.build(loading.Machine(environ=os.environ, replicas=options.replicas).plan_of(Recipe()))
    trainer, every = built.trainer, PrecisionWatch().every
    batches = trainer.batches(built.plan.data)
    reporter = Reporter(model_dir="", total_steps=0, is_chief=False)
    watch = Watch(trainer, session.float32_model(built), reporter)

    looked_at = trainer.batches(built.plan.data, runtime=trainer.runtime.host)

    def sample() -> None:
        watch.sample(next(looked_at))

    def timed(action) -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    trainer.train(batches, 1)
    first_sample = timed(sample)
    steps, samples = [], []
    for _ in range(options.rounds):
        steps.append(timed(lambda: trainer.train(batches, options.steps)) / options.steps)
        samples.append(timed(sample))
    ratios = sorted(sample / step for sample, step in zip(samples, steps, strict=True))
    median = statistics.median(ratios)
    return {
        "recipe": options.gin_file,
        "params": options.gin_param,
        "policy": built.plan.policy,
        "replicas": built.plan.strategy.num_replicas,
        "weights": sum(int(weight.value.shape.num_elements()) for weight in built.model.trainable_variables),
        "milliseconds_a_step": [round(1e3 * seconds, 2) for seconds in steps],
        "milliseconds_a_sample": [round(1e3 * seconds, 2) for seconds in samples],
        "seconds_of_the_first_sample": round(first_sample, 2),
        "steps_a_sample_takes_median": round(median, 3),
        "steps_a_sample_takes_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "default_every": every,
        "cost_at_default_percent": round(100 * median / every, 3),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gin_file", default="resnet_cpu.gin")
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="plain steps timed in a round")
    parser.add_argument("--rounds", type=int, default=8)
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
