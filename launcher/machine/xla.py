"""Whether XLA compiles what is being traced, for what is fastest in one form there and in another as kernels."""

import contextlib
import contextvars
from collections.abc import Iterator

_compiles = contextvars.ContextVar("compiles", default=False)


@contextlib.contextmanager
def compiling(on: bool) -> Iterator[None]:
    """Functions that are traced in this block will be compiled by XLA, or not."""
    token = _compiles.set(on)
    try:
        yield
    finally:
        _compiles.reset(token)


def is_compiling() -> bool:
    """Whether this is traced for XLA; False where nobody says."""
    return _compiles.get()
