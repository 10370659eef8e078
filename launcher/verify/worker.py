"""Worker of a verification: trains some steps of a recipe on one topology and writes their record.

python -m launcher.verify.worker JOB.json
"""

import logging
import os
import sys
from collections.abc import Iterator

from launcher.machine.tensorflow_import import import_tensorflow

import_tensorflow()  # before the others, which import it as Python does: slower

import numpy as np  # noqa: E402

from launcher.config import gin_bindings, gin_used  # noqa: E402
from launcher.errors import EXIT_DONE, UsageError  # noqa: E402
from launcher.machine import child_process, cluster, exit_barrier  # noqa: E402
from launcher.run import loading, session  # noqa: E402
from launcher.run.start import starting_point  # noqa: E402
from launcher.step.layers import turn_off_dropout  # noqa: E402
from launcher.step.trainer import StepRecords  # noqa: E402
from launcher.tasks.base import Decodes, folded, metric_results  # noqa: E402
from launcher.verify import control  # noqa: E402
from launcher.verify.compare import STEP_ARRAYS, Record, digest  # noqa: E402
from launcher.verify.processes import TrainingJob, read_job  # noqa: E402
from launcher.verify.settings import VerifySettings  # noqa: E402

# Of the environment, only this may say where the process stands and what it may use.
_ENVIRONMENT = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")


def main(argv: list[str]) -> int:
    """Trains the job in the file that the only argument names and returns the exit code."""
    child_process.follow_parent()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    job = read_job(argv[1])
    environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    peers = cluster.resolve(environ)
    try:
        with gin_bindings.usage_errors():
            built, batches = _build(job, environ)
            record = _train(job, built, batches, is_chief=peers.is_chief)
    except UsageError as error:
        job.refusal_path(peers.index).write_text(str(error), "utf-8")
        return error.exit_code
    with exit_barrier.chief_last(peers):
        record.save(job.record_path(peers.index))
    return EXIT_DONE


def _build(job: TrainingJob, environ: dict[str, str]) -> tuple[session.Session, Iterator]:
    resolved = loading.Machine(
        environ=environ,
        strategy=job.topology.strategy,
        replicas=job.topology.local_replicas,
        seed=job.seed,
        deterministic=job.deterministic,
        runtime=job.topology.runtime,
    ).resolve(job.gin_files, job.gin_params)
    built = session.build(resolved)
    starting_point.begin(built.trainer, resolved.recipe.start)
    if not VerifySettings().dropout:  # the rest of it is the parent's
        turn_off_dropout(built.model)
    batches = built.trainer.batches(control.install(built) if job.control else resolved.data)
    built.trainer.trace(batches)
    gin_used.check_all_used()
    return built, batches


def _train(job: TrainingJob, built: session.Session, batches: Iterator, *, is_chief: bool) -> Record:
    trainer = built.trainer
    records = trainer.train(batches, job.steps)
    steps = {
        "loss": np.divide(records.loss, records.weight, out=np.zeros(job.steps), where=records.weight != 0),
        "gradient_norm": records.gradient_norm,
        "loss_scale": records.loss_scale,
        "finite": records.finite,
    }
    built.runtime.state.bring_home()
    trained = {id(variable) for variable in built.model.trainable_variables}
    state = dict(trainer.state.snapshot()) if is_chief or trainer.state.snapshots_together else {}
    state |= _metrics(built, records)
    return Record(
        **steps,
        state=state if is_chief else {},
        trained=tuple(name for name, variable in trainer.state.variables().items() if id(variable) in trained),
        digests=_digests(built, {f"steps/{name}": digest(steps[name]) for name in STEP_ARRAYS}),
    )


def _metrics(built: session.Session, records: StepRecords) -> dict[str, np.ndarray]:
    """Metrics of all steps together, and of an evaluation with the final weights, as far as they are numbers."""
    task, done = built.plan.recipe.task, records.finite > 0
    sums = {name: folded(name, values[done]) for name, values in records.metrics.items()}
    found = metric_results(task, sums, records.weight[done].sum())
    if built.plan.data.num_eval_examples and not isinstance(task, Decodes):
        built.evaluator.needs_variables(last=False)
        found |= {f"val_{name}": value for name, value in built.evaluator.evaluate(last=False).items()}
    return {f"metrics/{name}": np.array(value) for name, value in found.items() if np.isfinite(value)}


def _digests(built: session.Session, steps: dict[str, str]) -> tuple[dict[str, str], ...]:
    host = built.runtime.host
    found: list[dict[str, str]] = [dict(steps) for _ in host.strategy.extended.worker_devices]
    for name, variable in built.trainer.state.variables().items():
        if built.trainer.state.shard_of(variable) is not None:
            continue  # each replica has another part
        for digests, copy in zip(found, host.state.copies(variable), strict=True):
            digests[name] = digest(copy.numpy())
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
