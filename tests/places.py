"""Where this checkout is. Not in conftest.py: folders have one each, and which is imported by that name is chance."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SMALL_DIGITS = str(ROOT / "tests" / "small_digits.gin")
"""A recipe of two layers, for tests whose subject is not the network."""
