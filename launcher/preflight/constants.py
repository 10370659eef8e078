"""Constant: a number that estimates stand on, with its source."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """One number, its unit and where it is from."""

    value: float
    unit: str
    source: str
