"""Attributes of others' objects that stand replaced for a while."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


def put(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Puts a value in the place of what an owner has, or inherits, until `undo` is closed."""
    kind = type if isinstance(owner, type) else object
    if name in vars(owner):
        undo.callback(kind.__setattr__, owner, name, vars(owner)[name])
    else:
        undo.callback(kind.__delattr__, owner, name)
    kind.__setattr__(owner, name, value)


class Shared:
    """Replacements that stand once for all threads: those of replicas take turns while they are traced."""

    def __init__(self) -> None:
        self._lock, self._inside, self._undo = threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def standing(self, make: Callable[[contextlib.ExitStack], None]) -> Iterator[None]:
        """A block for whose length they stand, and longer while another thread is inside; the first one makes them."""
        with self._lock:
            if not self._inside:
                make(self._undo)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._undo.close()
