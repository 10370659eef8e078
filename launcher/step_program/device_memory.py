"""Whether a compiled step fits the memory that JAX has on a device, known before it is run."""

from typing import Any

from launcher.errors import UsageError
from launcher.machine.jax_devices import NEEDS_MORE
from launcher.optimizers.weight_shards import bytes_of
from launcher.reporting.units import bytes_text
from launcher.step_program.lowering import StepProgram


def check(program: StepProgram, microbatches: int, offered: int, statistics: Any) -> None:
    """Raises UsageError where a step needs more than the `offered` bytes, with about what would fit.

    Args:
      microbatches: of a replica's batch.
      offered: of each device; 0 where it is not known.
      statistics: of `memory_analysis` of JAX's compiled function, or None.
    """
    if statistics is None or not offered:
        return
    arguments = statistics.argument_size_in_bytes
    kept = statistics.output_size_in_bytes - statistics.alias_size_in_bytes
    needed = arguments + kept + statistics.temp_size_in_bytes
    if needed <= offered:
        return
    of_batch = [one for one in program.arguments if one.kind == "batch"]
    state, size = arguments - bytes_of(of_batch), of_batch[0].shape[0]
    # What grows with the rows of a microbatch, and with those of the whole batch.
    rows = size // microbatches * (offered - arguments) / (needed - arguments)
    largest = int(size * (offered - state) / (needed - state)) // microbatches * microbatches * program.num_replicas
    parts = next((count for count in range(2, size + 1) if size % count == 0 and size / count <= rows), 0)
    fits = [f"train.microbatches = {parts}"] if parts else []
    fits += [f"train.global_batch_size = {largest}"] if largest > 0 else []
    advice = f"{' or '.join(fits)} may fit" if fits else "train.shard divides the state among more devices"
    raise UsageError(
        f"the step needs {bytes_text(needed)} {NEEDS_MORE}, {bytes_text(state)} of it state, and JAX has "
        f"{bytes_text(offered)} there: {advice}; --mode=preflight --engine=pjrt finds what does"
    )
