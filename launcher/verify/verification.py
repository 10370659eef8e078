"""`--mode=verify`: a recipe trained on one replica and on other topologies, and compared."""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, TrainingError, UsageError
from launcher.machine import devices, nvidia
from launcher.machine.runtime_kinds import RuntimeKind
from launcher.model_dir import check_model_dir, lease
from launcher.modes import Request
from launcher.reporting import strict_json
from launcher.reporting.console import make_console
from launcher.reporting.summary import versions
from launcher.run import loading
from launcher.run.plan import check_shard
from launcher.verify import control as control_lib
from launcher.verify import processes, table
from launcher.verify.compare import Deviation, Record, compare, load_record, not_finite
from launcher.verify.control import Control
from launcher.verify.processes import Died, Refused, TrainingJob
from launcher.verify.settings import ONE_REPLICA, Tolerances, Topology, VerifySettings, for_policy
from launcher.verify.table import Result

_AT_ONCE = (
    ". The first step differs already: is the task's loss() a sum over the batch, not a mean, with the sum of the "
    "weights beside it? Is the loss of a model's own train_step a mean over examples? Does every "
    "layer treat each example by itself, or in groups of a fixed size?"
)

_DROPOUT_OFF = "dropout and noise off: each replica draws masks of its own (verify.dropout = True leaves them on)"
_DROPOUT_ON = "dropout and noise on, as verify.dropout asks for: each replica draws masks of its own"


def run(request: Request) -> int:
    """Verifies the recipe; see `Verification`."""
    model_dir = check_model_dir(request.run_dir)
    writes_to = None if request.dry_run else model_dir
    with lease.held(writes_to, environ=os.environ, say=print), gin_bindings.usage_errors():
        return Verification(request).run(model_dir)


class Verification:
    """The verification of one recipe, as the flags gave it."""

    def __init__(self, request: Request):
        self._request, self.runtime = request, request.runtime
        self.runtime.check()
        # The machine may have neither the TPU nor the cluster that the recipe is for; any one device will do here.
        machine = loading.Machine(
            environ={}, strategy="one_device", seed=request.seed, deterministic=request.deterministic, connect=False
        )
        self.plan = machine.resolve(request.gin_file, request.gin_param)
        if not self.runtime.divides_weights:
            check_shard(self.plan)
        self.settings = VerifySettings()
        self.tolerances: Tolerances = self.settings.tolerances or for_policy(self.plan.policy)
        self.steps = min(self.settings.steps, self.plan.total_steps)
        self.topologies = self.settings.topologies(self.plan.microbatches, self.runtime)
        self._num_gpus, self._devices = _choose_devices(self.settings, self.topologies, self.runtime)
        self._console = make_console(total_steps=self.steps)

    def describe(self) -> dict[str, str]:
        """Describes what is going to be done, for people."""
        lines = self.plan.describe()
        for name in ("cluster", "strategy"):  # those of one replica, which is not what people ask about
            lines.pop(name, None)
        return {
            **lines,
            "batch": str(self.plan.recipe.global_batch_size),
            "reduce dtype": self.plan.reduce_dtype.name,
            "steps": f"{self.steps} of {self.plan.total_steps:,}",
            "topologies": ", ".join(topology.name for topology in (ONE_REPLICA, *self.topologies)),
            "engine": "; of one replica, ".join(dict.fromkeys([self.runtime.name, ONE_REPLICA.engine])),
            "devices": self._devices,
            "dropout": _DROPOUT_ON if self.settings.dropout else _DROPOUT_OFF,
        }

    def run(self, model_dir: str) -> int:
        """Trains and compares; prints the table and writes verify.json; a dry run only says what would be done.

        Returns:
          The exit code of a recipe that every topology trains alike.

        Raises:
          UsageError: the recipe cannot be built, or on one replica only.
          TrainingError: a topology deviates or fails, or one replica already fails.
        """
        self._console.plan(self.describe())
        if self._request.dry_run:
            return EXIT_DONE
        self.plan.data.check()
        with _terminable(), tempfile.TemporaryDirectory(prefix="verify-") as folder:
            baseline = self._baseline(Path(folder))
            results = [self._compare(topology, baseline, Path(folder)) for topology in self.topologies]
            suspects = [result for result in results if not result.within and may_be_rounding(result, baseline)]
            control = self._control(baseline, Path(folder)) if suspects else None
        results = [dataclasses.replace(one, control=control) if one in suspects else one for one in results]
        table.show(results, self.tolerances, self._console)
        self._write(model_dir, results, control)
        check(results)
        compared = sum(not isinstance(result.failure, Refused) for result in results)
        self._console.note(
            f"verified: {compared} of {len(results)} topologies train as one replica does over {self.steps} steps in "
            f"{self.plan.policy}"
        )
        for line in _about_rounding(results):
            self._console.note(line)
        return EXIT_DONE

    def _baseline(self, folder: Path) -> Record:
        started = time.monotonic()
        try:
            baseline = self._train(ONE_REPLICA, folder)
        except Refused as refusal:
            raise UsageError(str(refusal)) from None
        except Died as death:
            raise TrainingError(f"one replica, which all is compared with: {death}") from None
        skipped = int((baseline.finite == 0).sum())
        self._console.note(
            f"{ONE_REPLICA.name}: {time.monotonic() - started:.0f} s, loss {baseline.loss[0]:.4g} -> "
            f"{baseline.loss[-1]:.4g}, {skipped} of {self.steps} steps skipped"
        )
        if bad := not_finite(baseline):
            raise TrainingError(
                f"one replica trains to values that are not finite ({bad}); lower the learning rate or verify.steps"
            )
        if not baseline.finite.any():
            raise TrainingError(
                f"one replica skipped all {self.steps} steps; raise verify.steps or lower the initial loss scale"
            )
        return baseline

    def _compare(self, topology: Topology, baseline: Record, folder: Path) -> Result:
        started = time.monotonic()
        deviations: tuple[Deviation, ...] = ()
        failure: Refused | Died | None = None
        try:
            deviations = compare(baseline, self._train(topology, folder), self.tolerances)
        except (Refused, Died) as error:
            failure = error
        seconds = time.monotonic() - started
        result = Result(topology=topology, seconds=seconds, deviations=deviations, failure=failure)
        self._console.note(f"{topology.name}: {seconds:.0f} s{_so_far(result)}")
        return result

    def _control(self, baseline: Record, folder: Path) -> Control:
        """Trains one replica once more with nothing changed but the rounding."""
        if self.settings.dropout:
            return Control(void="with verify.dropout = True, masks go by an example's place in the batch")
        started = time.monotonic()
        try:
            found = self._train(ONE_REPLICA, folder, control=True)
        except (Refused, Died) as failure:
            return Control(void=f"it failed: {failure}")
        control = control_lib.of(compare(baseline, found, self.tolerances), baseline)
        figures = ", ".join(f"{one.quantity} {one.text}" for one in control.deviations if one.value is not None)
        self._console.note(
            f"control (one replica, the rows of each batch permuted, gradients rounded once more): "
            f"{time.monotonic() - started:.0f} s, {figures}"
        )
        return control

    def _train(self, topology: Topology, folder: Path, *, control: bool = False) -> Record:
        changes = [f"train.precision = '{self.plan.policy}'", f"train.microbatches = {topology.microbatches}"]
        if topology.runtime.has_devices:  # compared with TensorFlow's CPU, where it lists no GPU
            changes.append("gpu.tf32 = False")
        job = TrainingJob(
            gin_files=self._request.gin_file,
            gin_params=(*self._request.gin_param, *changes),
            seed=self.plan.seed,
            deterministic=self.plan.deterministic,
            topology=topology,
            steps=self.steps,
            folder=str(folder / ("control" if control else topology.name.replace(" ", "-"))),
            control=control,
        )
        os.mkdir(job.folder)
        paths = processes.run(job, num_gpus=self._num_gpus, timeout_seconds=self.settings.timeout_seconds)
        found = load_record(paths)
        for path in paths:  # the state of a large model, which only the comparison at hand needs
            path.unlink()
        return found

    def _write(self, model_dir: str, results: Sequence[Result], control: Control | None) -> None:
        content = {
            "verified": all(result.verified for result in results),
            "within_tolerance": all(result.within for result in results),
            "recipe": list(self._request.gin_file),
            "gin_params": list(self._request.gin_param),
            **self.describe(),
            "steps": self.steps,
            "tolerances": dataclasses.asdict(self.tolerances),
            "topologies": table.as_json(results),
            "control": table.control_as_json(control),
            "versions": versions(),
        }
        try:
            tf.io.gfile.makedirs(model_dir)
            with tf.io.gfile.GFile(os.path.join(model_dir, "verify.json"), "w") as file:
                file.write(f"{strict_json.dumps(content, indent=2)}\n")
        except (OSError, tf.errors.OpError) as error:
            raise UsageError(f"verify.json cannot be written to --model_dir={model_dir}: {error}") from None


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM run every `finally`, so that processes are ended and temporary files deleted."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def check(results: Sequence[Result]) -> None:
    """Ends the verification with an error if anything speaks against it.

    Raises:
      UsageError: nothing could be compared.
      TrainingError: a topology failed or deviates; the message names the worst offender.
    """
    if all(isinstance(result.failure, Refused) for result in results):
        raise UsageError("no other topology can be built for this recipe, so nothing was verified; see the reasons")
    failed = [result for result in results if not result.verified]
    if not failed:
        return
    if died := [result.topology.name for result in failed if result.failure]:
        raise TrainingError(f"not verified: {died[0]} failed; its last words are above")
    offenders = [(one, result) for result in failed for one in result.deviations if not one.within]
    worst, result = max(offenders, key=lambda pair: pair[0].excess)
    raise TrainingError(
        f"{len(failed)} of {len(results)} topologies do not train as one replica does. "
        f"The worst offender is {result.topology.name}: {worst.sentence}{_advice(offenders)}"
    )


def may_be_rounding(result: Result, baseline: Record) -> bool:
    """Whether a topology's deviation may be rounding, so that the control is needed."""
    return bool(result.deviations) and control_lib.may_be_rounding(result.deviations, baseline)


def _advice(offenders: Sequence[tuple[Deviation, Result]]) -> str:
    if any(one.first_step == 1 for one, _ in offenders):
        return _AT_ONCE
    asked = [result.control for _, result in offenders if result.control is not None]
    if not asked:
        return ""
    if asked[0].void:
        return f". Whether that is rounding cannot be told, because the control cannot be used: {asked[0].void}"
    return (
        f". Rounding does not explain it: one replica deviates from itself less than 1/{control_lib.FACTOR:g} as far "
        "when only the rounding differs. Verify again with fewer verify.steps, or with train.precision = 'float32': "
        "rounding shrinks with them, a mistake in the task does not"
    )


def _about_rounding(results: Sequence[Result]) -> list[str]:
    found = [result for result in results if result.is_rounding]
    if not found:
        return []
    steps = [one.first_step for result in found for one in result.deviations if one.first_step is not None]
    most = f" ({min(steps) - 1} at most)" if steps else ""
    return [
        f"amplified rounding in {', '.join(result.topology.name for result in found)}: out of tolerance, but within "
        f"{control_lib.FACTOR:g} times what one replica deviates from itself when only the rounding differs. This "
        f"training multiplies rounding errors. To compare within the tolerances, bind fewer verify.steps{most}. A "
        "longer warm-up, a smaller learning rate, an activation without a kink (GELU) or, instead of 16 bits, float32 "
        "make the training less sensitive"
    ]


def _so_far(result: Result) -> str:
    """Describes a topology before the control, which is trained last and only where it is needed."""
    if result.deviations:
        return "" if result.within else ", out of tolerance"
    return f", {result.outcome}"


def _choose_devices(settings: VerifySettings, topologies: Sequence[Topology], runtime: RuntimeKind) -> tuple[int, str]:
    """Number of GPUs to use, and what people should know about it."""
    # JAX sees GPUs that a TensorFlow for CPUs does not.
    found = len(nvidia.visible(os.environ) if runtime.uses_jax else devices.discover().gpus)
    wanted = max(max(topology.replicas, topology.workers) for topology in topologies)
    if settings.devices == "gpu":
        if not found:
            raise UsageError(f"verify.devices = 'gpu', but {runtime.name} finds no GPU on this machine; leave it out")
        return found, f"{found} GPU(s), asked for"
    if settings.devices == "cpu":
        return 0, "logical CPU devices, asked for"
    if found >= wanted:
        return found, f"{found} GPU(s)"
    return 0, f"logical CPU devices: {wanted} GPUs are needed, there are {found}"
