"""Saving beside the training: a thread writes what the loop has copied, one checkpoint at a time."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping

from launcher.checkpoints.bundle import State, Writers
from launcher.checkpoints.errors import CheckpointWriteError
from launcher.checkpoints.store import Best, CheckpointStore

ON_ERROR = ("stop", "continue")

_logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Saver:
    """Saves the states of a run while it goes on, and knows at once which of them is the best.

    The caller's thread is held for the copying of the state, and for the write before it when that still goes on. All
    methods belong to that one thread.

    Args:
        store: Where checkpoints go; off the chief nothing is copied or written.
        asynchronous: Whether training goes on meanwhile. Else `save` waits until all is written.
        on_error: What a checkpoint that cannot be written means: "stop" raises, "continue" tells `warn` and goes on
            until `finish`.
        warn: Takes one message for people; called in the caller's thread.
        best: What the run has to beat; then the best so far, also while its checkpoint is still being written, and
            forgotten when it cannot be.
        may_write: Called by `check`; raises when this run must not write any more.
        saved: Takes the step of each checkpoint that is whole; called in the caller's thread.
        writers: The workers that each write their own parts of a state, all of which call `save` after the same steps;
            None where the chief writes all.
    """

    store: CheckpointStore
    _: dataclasses.KW_ONLY
    asynchronous: bool = True
    on_error: str = "stop"
    warn: Callable[[str], None] = _logger.warning
    best: Best | None = None
    may_write: Callable[[], None] = lambda: None
    saved: Callable[[int], None] = lambda step: None
    writers: Writers | None = None

    def __post_init__(self) -> None:
        self._best_on_disk = self.best
        self._thread: threading.Thread | None = None
        # What the thread has come to, read when it has ended.
        self._whole: int | None = None
        self._error: BaseException | None = None
        self._saved_step: int | None = None
        self._failed: CheckpointWriteError | None = None

    def save(
        self,
        step: int,
        snapshot: Callable[[], State],
        *,
        metrics: Mapping[str, float] | None = None,
        best: Best | None = None,
    ) -> None:
        """Saves the state that `snapshot` returns, and then records it as the best if `best` is given.

        Args:
            step: Training step of the state. When it was the last one saved, nothing is done.
            snapshot: Copies the state; called once, when the write before has ended. The arrays now belong to the
                saver: the training must not change them.
            metrics: Recorded in the manifest for people.
            best: What makes this the best checkpoint.

        Raises:
            CheckpointWriteError: This or the write before failed, and failures stop the run.
        """
        writers, is_chief = self.writers, self.store.is_chief
        if not is_chief and writers is None:
            self.best = best or self.best
            return
        self._settle()
        is_new = step != self._saved_step or best is not None
        if writers is None and not is_new:
            return
        self.best = best or self.best
        state = snapshot()
        # Where the chief has made room, all write.
        if writers is not None and not writers.any(is_chief and is_new and self.store.make_room(step, state)):
            if not (is_chief and is_new):
                return
            writers = None
        # The thread alone holds the state. A daemon: a process that is told twice to end does not wait for a disk that
        # hangs.
        self._thread = threading.Thread(
            target=self._write, args=(step, state, metrics, best, writers), name=f"save step {step}", daemon=True
        )
        self._thread.start()
        if not self.asynchronous:
            self._settle()

    def _write(
        self, step: int, state: State, metrics: Mapping[str, float] | None, best: Best | None, writers: Writers | None
    ) -> None:
        try:
            self.store.save(step, state, metrics=metrics, writers=writers)
            self._whole = step
            if best is not None:
                # Only now: a record of the best must never name a checkpoint that is not there.
                self.store.mark_best(step, metric=best.metric, value=best.value)
                self._best_on_disk = best
        except BaseException as error:  # raised again in the caller's thread
            self._error = error

    def check(self) -> None:
        """Returns at once; raises where a write has failed meanwhile and that stops the run, or as `may_write`."""
        self.may_write()
        if self._thread is not None and not self._thread.is_alive():
            self._settle()

    def finish(self) -> None:
        """Waits until what was saved last is on the disk; raises where it is not, whatever failures otherwise mean."""
        self._settle()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Waits for the write under way, for when another error ends the run; its own failure is a warning then."""
        if self._thread is None:
            return
        if self.writers is not None:
            self.writers.given_up.set()
        self._thread.join()
        if self._error is not None:
            _logger.warning("%s", self._error)
        self._thread = self._error = None

    def _settle(self) -> None:
        """Waits for the write under way and takes what came of it."""
        if self._thread is None:
            return
        self._thread.join()
        error, whole = self._error, self._whole
        self._thread = self._error = self._whole = None
        if whole is not None:
            self._saved_step = whole
            if self.store.is_chief:
                self.saved(whole)
        self._failed = error if isinstance(error, CheckpointWriteError) else None
        if error is None:
            return
        self.best = self._best_on_disk
        if self._failed is None or self.on_error == "stop":
            raise error
        self.warn(f"{self._failed.facts} Training goes on and tries again at the next save.")
