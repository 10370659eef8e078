"""Records of runs, every step's numbers and the final state, and their comparison: the deviation of each quantity."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from launcher.verify.settings import Tolerances

STEP_ARRAYS = ("loss", "gradient_norm", "loss_scale", "finite")
_TOLERANCES = {
    "loss": "loss",
    "gradient norm": "gradient_norm",
    "weights": "weights",
    "optimizer slots": "slots",
    "moving statistics": "moving_statistics",
    "metrics": "gradient_norm",  # they jump, too, where an example comes to lie on the other side of a threshold
}
# Of variables beside weights, statistics and slots, how their names begin.
_PREFIXES = {"loss_scale": "loss scale", "counters": "skipped steps", "metrics": "metrics"}
EXACT = ("loss scale", "skipped steps", "replicas")
"""Quantities that are equal or not."""
QUANTITIES = (*_TOLERANCES, *EXACT)

# A loss near zero is a small difference of large numbers, whose error stays that of the large ones.
_SMALLEST_OF_FIRST = 1e-2
_SMALLEST_METRIC = 1e-2


# ---------------------------------------------------------------------------------------------------- records


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


def load_record(paths: Sequence[Path]) -> Record:
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


# ------------------------------------------------------------------------------------------------- deviations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation:
    """The deviation of one of `QUANTITIES` from one replica's.

    Attributes:
      value: the largest deviation, inf where something is not finite, missing or unequal in an exact quantity; None
        where there is nothing to compare, as the replicas of a topology that has one.
      where: the step or variable of the largest deviation, in words where that is no number; empty without any.
      first_step: the first step out of tolerance, None when there is none or steps are not what is compared.
    """

    quantity: str
    value: float | None
    tolerance: float = 0.0
    where: str = ""
    first_step: int | None = None

    @property
    def within(self) -> bool:
        return self.value is None or self.value <= self.tolerance

    @property
    def excess(self) -> float:
        """The value as a multiple of the tolerance."""
        if self.within or self.value is None:
            return 0.0
        return self.value / self.tolerance if self.tolerance else math.inf

    @property
    def text(self) -> str:
        """The value as the table shows it."""
        if self.value is None:
            return "-"
        if self.quantity in EXACT:
            return "equal" if self.within else "differ"
        return f"{self.value:.1e}" if math.isfinite(self.value) else "infinite"

    @property
    def sentence(self) -> str:
        """The quantity, the place and, of a number, the tolerance."""
        if self.value is None or not math.isfinite(self.value):
            return f"{self.quantity}: {self.where}"
        since = "" if self.first_step is None else f", out of tolerance from step {self.first_step} on"
        return f"{self.quantity} off by {self.value:.2g} at {self.where} (tolerance {self.tolerance:.2g}{since})"


def tolerance_of(quantity: str, tolerances: Tolerances) -> float:
    """The tolerance of one of `QUANTITIES`; 0 for those that are exact."""
    return getattr(tolerances, _TOLERANCES[quantity]) if quantity in _TOLERANCES else 0.0


def compare(baseline: Record, record: Record, tolerances: Tolerances) -> tuple[Deviation, ...]:
    """Compares a topology's run with that of one replica.

    Returns:
      One deviation for each of `QUANTITIES`, in their order.
    """
    skipped = (baseline.finite == 0) & (record.finite == 0)
    names = _names(baseline)
    state = functools.partial(_state, baseline, record, names)
    exact = functools.partial(_exact, baseline, record, names)
    return (
        _curve("loss", baseline.loss, record.loss, skipped, tolerances.loss),
        _curve("gradient norm", baseline.gradient_norm, record.gradient_norm, skipped, tolerances.gradient_norm),
        state("weights", tolerances.weights),
        state("optimizer slots", tolerances.slots),
        state("moving statistics", tolerances.moving_statistics),
        state("metrics", tolerances.gradient_norm),
        exact("loss scale", baseline.loss_scale, record.loss_scale),
        exact("skipped steps", 1 - baseline.finite, 1 - record.finite),
        _replicas(record),
    )


def not_finite(record: Record) -> str | None:
    """Names the first value of a record that is not finite although it was applied; None if there is none."""
    for step in np.flatnonzero((record.finite > 0) & ~(np.isfinite(record.loss) & np.isfinite(record.gradient_norm))):
        return f"the loss or gradient of step {step + 1}"
    for name, value in record.state.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return name
    return None


def _curve(quantity: str, expected: np.ndarray, found: np.ndarray, skipped: np.ndarray, tolerance: float) -> Deviation:
    """The largest relative deviation over all steps, of which `skipped` ones were on both sides."""
    known = np.abs(expected[np.isfinite(expected)])
    smallest = _SMALLEST_OF_FIRST * (known[0] if known.size else 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(found - expected) / np.maximum(np.abs(expected), smallest)
    relative[(found == expected) & np.isfinite(found)] = 0.0
    # What overflowed everywhere was applied nowhere and is the same on both sides; any other value that is not finite
    # is none that could be compared.
    overflowed = skipped & ~np.isfinite(expected) & ~np.isfinite(found)
    relative = np.where(overflowed, 0.0, np.where(np.isfinite(relative), relative, math.inf))
    worst = int(np.argmax(relative))
    value = float(relative[worst])
    beyond = np.flatnonzero(relative > tolerance)
    first_step = int(beyond[0]) + 1 if beyond.size else None
    where = f"step {worst + 1}"
    if not math.isfinite(value):
        where += f" has {found[worst]:g}, on one replica {expected[worst]:g}"
    return Deviation(quantity=quantity, value=value, tolerance=tolerance, where=where, first_step=first_step)


def _names(record: Record) -> dict[str, list[str]]:
    """The variables of each quantity."""
    trained = set(record.trained)
    names: dict[str, list[str]] = {quantity: [] for quantity in QUANTITIES}
    for name in record.state:
        prefix, _, rest = name.partition("/")
        quantity = _PREFIXES.get(prefix, "optimizer slots")
        if prefix in ("model", "ema"):
            quantity = "weights" if f"model/{rest}" in trained else "moving statistics"
        names[quantity].append(name)
    return names


def _state(
    baseline: Record, record: Record, names: Mapping[str, Sequence[str]], quantity: str, tolerance: float
) -> Deviation:
    """The largest deviation over the variables of one quantity."""
    different = functools.partial(Deviation, quantity=quantity, value=math.inf, tolerance=tolerance)
    extra = [name for name in record.state if name not in baseline.state]
    if extra and quantity == "weights":
        return different(where=f"{extra[0]} is there, on one replica not")
    if not names[quantity]:
        return Deviation(quantity=quantity, value=None, tolerance=tolerance)
    scales = _slot_scales(baseline, names[quantity]) if quantity == "optimizer slots" else {}
    worst, worst_name = -1.0, ""
    for name in names[quantity]:
        expected, found = baseline.state[name], record.state.get(name)
        if found is None or found.shape != expected.shape:
            shape = "is missing" if found is None else f"has shape {found.shape} instead of {expected.shape}"
            return different(where=f"{name} {shape}")
        if quantity in ("moving statistics", "metrics"):
            scale = max(1.0 if quantity != "metrics" else _SMALLEST_METRIC, _largest([expected]))
        else:
            scale = scales.get(_slot_kind(name), 1.0)
        value = _distance(expected, found, scale)
        if not math.isfinite(value):
            return different(where=f"{name} is not finite or, being an integer, not equal")
        if value > worst:
            worst, worst_name = value, name
    return Deviation(quantity=quantity, value=worst, tolerance=tolerance, where=worst_name)


def _distance(expected: np.ndarray, found: np.ndarray, scale: float) -> float:
    if not expected.size:
        return 0.0
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, found) else math.inf
    with np.errstate(invalid="ignore"):  # inf - inf
        largest = float(np.max(np.abs(found.astype(np.float64) - expected)))
    if not math.isfinite(largest):
        return math.inf
    return largest / scale if largest else 0.0


def _slot_scales(record: Record, names: Iterable[str]) -> dict[str, float]:
    """The largest value among all slots of one kind, e.g. all of Adam's second moments.

    Not of each slot by itself: where a gradient is zero but for rounding, so is the slot, and its relative error says
    nothing.
    """
    kinds: dict[str, list[np.ndarray]] = {}
    for name in names:
        kinds.setdefault(_slot_kind(name), []).append(record.state[name])
    return {kind: _largest(values) or 1.0 for kind, values in kinds.items()}


def _slot_kind(name: str) -> str:
    """The last word of a slot's name: Keras calls them VARIABLE_momentum, VARIABLE_velocity and so on."""
    return name.rpartition("_")[2]


def _largest(values: Iterable[np.ndarray]) -> float:
    return max((float(np.max(np.abs(value))) for value in values if value.size), default=0.0)


def _exact(
    baseline: Record,
    record: Record,
    names: Mapping[str, Sequence[str]],
    quantity: str,
    expected: np.ndarray,
    found: np.ndarray,
) -> Deviation:
    """A sequence over the steps, and the variables behind it, which must be equal."""
    different = functools.partial(Deviation, quantity=quantity, value=math.inf)
    for step in np.flatnonzero(expected != found):
        return different(where=f"step {step + 1} has {found[step]:g}, on one replica {expected[step]:g}")
    for name in names[quantity]:
        before, after = baseline.state[name], record.state.get(name)
        if after is None or not np.array_equal(before, after):
            return different(where=f"{name} ends at {after}, on one replica at {before}")
    return Deviation(quantity=quantity, value=0.0)


def _replicas(record: Record) -> Deviation:
    first, *others = record.digests
    if not others:
        return Deviation(quantity="replicas", value=None)
    for index, other in enumerate(others, start=1):
        for name in first:
            if other.get(name) != first[name]:
                where = f"{name} on replica {index} has other bits than on replica 0"
                return Deviation(quantity="replicas", value=math.inf, where=where)
    return Deviation(quantity="replicas", value=0.0)
