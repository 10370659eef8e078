"""The checkpoints of one run: save, verify, read, retire."""

import dataclasses
import itertools
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from launcher.checkpoints.bundle import State, StoredArray, Writers, make_room, read_arrays, write_checkpoint
from launcher.checkpoints.disk import DELETING, WRITING, aside, remove, replace_durably
from launcher.checkpoints.errors import CheckpointReadError, NoWholeCheckpointError, read_error, shorten, write_error
from launcher.checkpoints.manifest import HOST, Damage, find_damage, folder_name, is_complete, read_manifest
from launcher.errors import UsageError
from launcher.machine import regular_file

_FOLDER = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_REWINDS, _BEST = "rewinds.json", "best.json"
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # of a record that is none

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The step of the checkpoint that evaluated best so far, and the metric that says so."""

    step: int
    metric: str
    value: float


@dataclasses.dataclass
class CheckpointStore:
    """The checkpoints of one run, in one directory that every worker can read and the chief writes.

    Args:
        directory: Where checkpoints live; made by the first save. A local or mounted path: a bucket has no rename.
        keep: How many of the newest whole checkpoints to keep; the best one is kept besides.
        keep_every_hours: Keep besides, for ever, checkpoints written at least so many hours apart; 0 for none.
        is_chief: Whether this process writes. Elsewhere `save` and `mark_best` return at once.
        run: What is compared when the run goes on, by name; recorded in every manifest.
        scaling: What the state of the loss scale belongs to, see `launcher.step.precision`; recorded in every manifest.
        before_write: Called before anything is written and before a checkpoint is committed; an error it raises stops
            that.
    """

    directory: str
    _: dataclasses.KW_ONLY
    keep: int = 3
    keep_every_hours: float = 0
    is_chief: bool = True
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaling: Mapping[str, Any] | None = None
    before_write: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._directory = Path(self.directory)
        self._whole: dict[int, bool] = {}  # What retention knows, so that it reads each old checkpoint once.

    def save(
        self, step: int, state: State, *, metrics: Mapping[str, float] | None = None, writers: Writers | None = None
    ) -> str:
        """Saves `state` as the checkpoint of `step`, retires those that are no longer kept, and returns its folder.

        A whole checkpoint of this step with arrays of the same names is left as it is; any other is replaced.

        Args:
            state: Arrays by name ('/' allowed) of any shape and any numeric or boolean dtype, bfloat16 included.
            metrics: Recorded in the manifest for people; one that is not finite as null.
            writers: Those that write their parts of the state together, after `make_room`.

        Raises:
            CheckpointWriteError: The disk is full or may not be written; nothing older is lost.
            CheckpointReadError: What is there already cannot be read.
        """
        folder = self._folder(step)
        if writers is None and not (self.is_chief and self._may_write(step, state)):
            return str(folder)
        finite = {name: float(v) if math.isfinite(v) else None for name, v in (metrics or {}).items()}
        about = {"metrics": finite, "run": dict(self.run), "scaling": self.scaling}
        write_checkpoint(self._directory, step, state, about, self.before_write, writers or Writers())
        if self.is_chief:
            self._whole[step] = True
            self._retire()
        return str(folder)

    def make_room(self, step: int, state: State) -> bool:
        """Whether several are to write the checkpoint of a step; for the chief, before any of them begins."""
        wanted = self._may_write(step, state)
        if wanted:
            try:
                make_room(self._directory, step)
            except OSError as error:
                raise write_error(f"the checkpoint of step {step}", self._directory, 0, error) from error
        return wanted

    def _may_write(self, step: int, state: State) -> bool:
        """Clears the way for a checkpoint; False where it is there, whole and with arrays of the same names."""
        self.before_write()
        folder = self._folder(step)
        is_whole = folder.exists() and find_damage(folder) is None
        if is_whole and self.manifest(step)["tensors"].keys() == state.keys():
            return False
        # What a killed writer left half-done; only the chief has others write, so nobody is at work there.
        for prefix in (WRITING, DELETING):
            for path in self._directory.glob(f"{prefix}*"):
                remove(path)
        return True

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending; contents are not verified (`latest` does)."""
        return [step for step in self._folders() if is_complete(self._folder(step))]

    def latest(self) -> int | None:
        """Returns the newest step whose checkpoint verifies, None when there is no checkpoint at all.

        Every file is read and compared with its checksum. A damaged checkpoint is named in a warning, left where it
        is for a person to look at, and the next older one is tried.

        Raises:
            CheckpointReadError: One cannot be read, so that nobody knows whether it is whole.
            NoWholeCheckpointError: There are checkpoints, and all are damaged.
        """
        skipped: dict[int, str] = {}
        while candidates := [step for step in self._folders() if step not in skipped]:
            step = candidates[-1]
            folder = self._folder(step)
            try:
                damage = find_damage(folder)
            except CheckpointReadError:
                if folder.exists():
                    raise
                continue
            if damage is None:
                return step
            # Else, the chief has retired it while it was being read, so there are newer ones: look again.
            if folder.exists():
                _logger.warning("Skipping the damaged checkpoint %s: %s.", folder, damage)
                skipped[step] = damage
        if not skipped:
            return None
        listed = "".join(f"\n  {folder_name(step)}: {damage}" for step, damage in skipped.items())
        raise NoWholeCheckpointError(
            f"No checkpoint in {self._directory} is whole:{listed}\nRestore one of them from a copy. To begin anew, "
            f"choose another --model_dir, or move {self._directory.parent} away."
        )

    def best(self) -> int | None:
        """Returns the step last given to `mark_best` when its checkpoint verifies, None otherwise."""
        record = self.best_record()
        if record is None:
            return None
        damage = find_damage(self._folder(record.step))
        if damage is not None:
            _logger.warning("The best checkpoint %s is damaged: %s.", self._folder(record.step), damage)
        return record.step if damage is None else None

    def best_record(self) -> Best | None:
        """Returns what `mark_best` recorded last, so that a resumed run knows what it has to beat.

        A damaged record is a warning and None, and one that cannot be read a CheckpointReadError.
        """
        try:
            record = self._recorded(_BEST, None)
            if record is not None:
                return Best(step=int(record["step"]), metric=str(record["metric"]), value=float(record["value"]))
        except _DAMAGE as error:
            _logger.warning(
                "Ignoring the damaged record of the best checkpoint %s: %r.", self._directory / _BEST, error
            )
        return None

    def mark_best(self, step: int, *, metric: str, value: float) -> None:
        """Records that `step`, which is there, is the best checkpoint; compares nothing, the caller decides.

        Raises:
            CheckpointWriteError: The record could not be written.
        """
        if not self.is_chief:
            return
        record = {"step": int(step), "metric": metric, "value": float(value), "time": time.time()}
        self._record(_BEST, record, f"the record of the best checkpoint (step {step})")

    def rewinds(self) -> tuple[Mapping[str, Any], ...]:
        """Returns what `go_back` recorded, in its order: each with at least "left_out", a first and a last batch.

        Raises:
            CheckpointReadError: The record cannot be read, so that nobody knows which batches the run leaves out.
        """
        try:
            return tuple(
                {**rewind, "left_out": [first, last]}
                for rewind in self._recorded(_REWINDS, ())
                for first, last in [map(int, rewind["left_out"])]
            )
        except _DAMAGE as error:
            raise CheckpointReadError(
                f"{self._directory / _REWINDS} is damaged ({error!r}): it says which batches this run leaves out. "
                "Restore it from a copy, or remove it if the run may go on with other batches."
            ) from error

    def go_back(self, before: int, checkpoints: int, record: Mapping[str, Any]) -> int | None:
        """Removes the newest checkpoints, so that a run that begins now goes on from an older one, and says why.

        A run that is killed inside of this goes on from one of them, without what `record` leaves out.

        Args:
            before: The step that none of those that are left may have reached.
            checkpoints: How many of the whole ones before that step to go back; all of them, if there are fewer.
            record: Added to `rewinds`, with the step that was gone back to as "to_step".

        Returns:
            That step; None where there is no such checkpoint, and then nothing was changed.

        Raises:
            CheckpointWriteError: A checkpoint could not be removed or the record not be written.
            CheckpointReadError: What is there cannot be read.
        """
        older = [step for step in self.steps() if step < before and self._is_whole(step)]
        if not older:
            return None
        step = older[-min(checkpoints, len(older))]
        self.before_write()
        best = self.best_record()
        if best is not None and best.step > step:
            remove(self._directory / _BEST)
        for newer in reversed(self._folders()):
            if newer > step:
                try:
                    self._delete(newer)
                except OSError as error:
                    raise write_error(
                        f"the removal of the checkpoint of step {newer}", self._folder(newer), 0, error
                    ) from error
        rewinds = [*self.rewinds(), {**record, "to_step": step}]
        self._record(_REWINDS, rewinds, "the record of the batches that are left out")
        return step

    def _recorded(self, name: str, otherwise: Any) -> Any:
        """Contents of a small file of JSON, or `otherwise` without it; CheckpointReadError where it cannot be read."""
        path = self._directory / name
        try:
            return json.loads(regular_file.read(path))
        except FileNotFoundError:
            return otherwise
        except OSError as error:
            raise read_error(path, error) from error

    def _record(self, name: str, record: Any, what: str) -> None:
        """Replaces a small file of JSON durably and at once; CheckpointWriteError where `what` cannot be written."""
        path = self._directory / name
        try:
            replace_durably(path, record)
        except OSError as error:
            raise write_error(what, path, 0, error) from error

    def read(self, step: int, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
        """Returns the arrays saved at `step` whose name is wanted, bit for bit, in the order they were given to `save`.

        Raises:
            CheckpointReadError: There is no such checkpoint (any more), or it is damaged.
        """
        stored = self.stored(step, wanted)
        return dict(zip(stored, read_arrays([*stored.values()]), strict=True))

    def stored(self, step: int, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, StoredArray]:
        """The same arrays, each read when it is due, or a stretch of it."""
        folder, tensors = self._folder(step), self.manifest(step)["tensors"]
        return {
            name: StoredArray(folder, name, tuple(about["shape"]), about["dtype"])
            for name, about in tensors.items()
            if wanted(name)
        }

    def manifest(self, step: int) -> dict[str, Any]:
        """Returns what is recorded of a checkpoint: step, time (Unix seconds), metrics, run, scaling, files, tensors.

        Raises:
            CheckpointReadError: There is no such checkpoint (any more), or its manifest is damaged.
        """
        try:
            return read_manifest(self._folder(step))
        except (Damage, OSError) as damage:
            raise CheckpointReadError(f"The checkpoint {self._folder(step)} cannot be read: {damage}.") from damage

    def check_compatible(
        self,
        step: int,
        expected: Mapping[str, tuple[Sequence[int], str]],
        stand_ins: Mapping[str, str] = MappingProxyType({}),
        prefix: str = "",
    ) -> None:
        """Refuses a checkpoint that was written by another model.

        Args:
            expected: Shape and name of the dtype of every array the model needs, by name.
            stand_ins: Names that may be missing or left over, each with the name of what stands in for it.
            prefix: Only the checkpoint's arrays whose names begin with it are compared.

        Raises:
            UsageError: Names are missing or unexpected, or shapes or dtypes differ; at most five of each are shown.
            CheckpointReadError: There is no such checkpoint, or its manifest is damaged.
        """
        tensors = self.manifest(step)["tensors"]
        stored = {
            name: f"{about['dtype']}{about['shape']}"
            for name, about in tensors.items()
            if name.startswith(prefix) and not name.startswith(HOST)
        }
        wanted = {name: f"{dtype}{[*shape]}" for name, (shape, dtype) in expected.items()}
        differences = {
            "missing": [f"{name} {wanted[name]}" for name in wanted if name not in stored and name not in stand_ins],
            "unexpected": [f"{name} {stored[name]}" for name in stored if name not in wanted and name not in stand_ins],
            "different": [
                f"{name} is {stored[name]} in the checkpoint, {wanted[name]} in the model"
                for name in wanted
                if stored.get(name, wanted[name]) != wanted[name]
            ],
        }
        details = "".join(f"\n  {kind}: {shorten(names)}" for kind, names in differences.items() if names)
        if details:
            raise UsageError(
                f"This model_dir holds a checkpoint of another model (step {step} in {self._directory}).{details}\n"
                f"Choose another --model_dir, or remove {self._directory.parent}."
            )

    def _folder(self, step: int) -> Path:
        return self._directory / folder_name(step)

    def _folders(self) -> list[int]:
        """Steps that have a folder, whole or not, ascending."""
        try:
            entries = [entry.name for entry in os.scandir(self._directory) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointReadError(f"The checkpoints in {self._directory} cannot be listed: {error}.") from error
        return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, entries) if match)

    def _retire(self) -> None:
        """Deletes the whole checkpoints that nothing keeps; damaged ones are evidence and stay."""
        steps = self.steps()
        try:
            best = self.best_record()
        except CheckpointReadError as error:
            _logger.warning("No old checkpoint is deleted for now, because the best one is not known: %s", error)
            return
        newest = itertools.islice(filter(self._is_whole, reversed(steps)), self.keep)
        times = {step: self.manifest(step)["time"] for step in steps} if self.keep_every_hours else {}
        kept = {*newest, *spaced(times, self.keep_every_hours), best.step if best else -1}
        for step in steps:
            if step in kept or not self._is_whole(step):
                continue
            try:
                self._delete(step)
            except OSError as error:
                _logger.warning("Could not delete the old checkpoint %s: %s.", self._folder(step), error)

    def _delete(self, step: int) -> None:
        folder = self._folder(step)
        hidden = aside(DELETING, folder)
        os.rename(folder, hidden)  # Readers see a checkpoint or none, never half of one.
        self._whole.pop(step, None)
        remove(hidden)

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            try:
                self._whole[step] = find_damage(self._folder(step)) is None
            except CheckpointReadError:
                return False
        return self._whole[step]


def spaced(times: Mapping[int, float], hours: float) -> set[int]:
    """The steps of checkpoints that lie at least `hours` apart, beginning with the first; `times` are Unix seconds.

    Taking away a step that is not among them, or adding one behind the last, changes nothing about those before: so
    what is once kept for ever stays so, whenever it is asked. 0 hours are for none at all.
    """
    kept: list[int] = []
    for step in sorted(times) if hours > 0 else ():
        if not kept or times[step] - times[kept[-1]] >= hours * 3600:
            kept.append(step)
    return set(kept)
