"""Which cases of a test run by default, and which say the same in one more size or combination."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def repeated_but(by_default: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """`every` case for `pytest.mark.parametrize`, of which all but those `by_default` run each night alone."""
    every = list(every)
    assert all(one in every for one in by_default), "a default that is no case"
    return [
        one
        if one in by_default
        else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.nightly)
        for one in every
    ]
