"""Record of a topology's run: every step's numbers, the final state, digests of the replicas."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

STEP_ARRAYS = ("loss", "gradient_norm", "loss_scale", "finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one run; numbers of the steps are float64 [steps].

    Attributes:
      loss, gradient_norm: of the mean over the global batch.
      loss_scale: the scale each step used.
      finite: 1 where the update was applied, 0 where it was skipped.
      state: the final state by name, as `Trainer.snapshot`, and `metrics/…`; empty in what any worker but the chief
        writes.
      trained: names of the trained weights in `state`.
      digests: for each replica, digests of its own copy of every variable by name.
    """

    loss: np.ndarray
    gradient_norm: np.ndarray
    loss_scale: np.ndarray
    finite: np.ndarray
    state: Mapping[str, np.ndarray]
    trained: tuple[str, ...]
    digests: tuple[Mapping[str, str], ...]

    def save(self, path: Path) -> None:
        notes = json.dumps({"trained": self.trained, "digests": [dict(one) for one in self.digests]})
        arrays = {f"steps/{name}": getattr(self, name) for name in STEP_ARRAYS}
        for name, value in self.state.items():  # NumPy's files know nothing of bfloat16
            arrays[f"state/{name}"] = value if value.dtype.kind in "fiub" else value.astype(np.float32)
        np.savez(path, notes=np.array(notes), **arrays)


def load(paths: Sequence[Path]) -> Record:
    """Reads what each process of a run saved, the chief first; the others add their replicas' digests."""
    chief, *others = (_load(path) for path in paths)
    return dataclasses.replace(chief, digests=tuple(digests for one in (chief, *others) for digests in one.digests))


def digest(value: np.ndarray) -> str:
    """A digest that two arrays share when they are equal bit for bit."""
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _load(path: Path) -> Record:
    with np.load(path) as file:
        notes = json.loads(str(file["notes"]))
        return Record(
            **{name: file[f"steps/{name}"] for name in STEP_ARRAYS},
            state={name.removeprefix("state/"): file[name] for name in file.files if name.startswith("state/")},
            trained=tuple(notes["trained"]),
            digests=tuple(notes["digests"]),
        )
