"""Time of a training step under each dtype policy, turn by turn on the same machine. Prints JSON.

    python benchmarks/step_times.py --gin_file=experiment_guide_mlp.gin --rounds=5 --steps=4

Every round times each policy once, each time another one first, so that what else the machine does falls on all alike;
ratios are of times of one round. Tracing and the first steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", default="experiment_guide_mlp.gin")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of one policy in one round")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may repeat; default: all; float32 always")
    parser.add_argument("--gin_param", action="append", default=[])
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import in_process

    policies = [policy for policy in POLICIES if policy in ["float32", *(options.policy or POLICIES)]]
    running = {}
    for policy in policies:
        made = in_process.build(options.gin_file, [*options.gin_param, f"train.precision = {policy!r}"])
        batches = made.trainer.batches(made.plan.data)
        # Before the next session is built: a layer may ask for the global policy while it is traced.
        made.trainer.train(batches, 2)
        running[policy] = (made.trainer, batches)
        examples = made.plan.recipe.global_batch_size
        parameters = sum(int(variable.shape.num_elements()) for variable in map(_value, made.model.trainable_variables))
    seconds: dict[str, list[float]] = {policy: [] for policy in policies}
    losses: dict[str, float] = {}
    for number in range(options.rounds):
        first = number % len(policies)
        for policy in policies[first:] + policies[:first]:
            trainer, batches = running[policy]
            start = time.perf_counter()
            records = trainer.train(batches, options.steps)
            losses[policy] = float(records.loss[-1] / records.weight[-1])
            seconds[policy].append((time.perf_counter() - start) / options.steps)
    result: dict[str, object] = {
        "recipe": options.gin_file,
        "bindings": options.gin_param,
        "examples_a_step": examples,
        "parameters": parameters,
        "steps_a_round": options.steps,
        "steps_in_all": 2 + options.rounds * options.steps,
    }
    for policy in policies:
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds[policy], seconds["float32"], strict=True))
        result[policy] = {
            "last_loss": round(losses[policy], 4),
            "seconds_a_step": round(statistics.median(seconds[policy]), 4),
            "microseconds_an_example": round(statistics.median(seconds[policy]) / examples * 1e6, 1),
            "of_float32": round(statistics.median(ratios), 3),
            "of_float32_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
    print(json.dumps(result, indent=2))


def _value(variable):
    return variable.value


if __name__ == "__main__":
    main()
