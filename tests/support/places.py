"""Where this checkout is. Not in conftest.py: folders have one each, and which is imported by that name is chance."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"

PYTHONPATH = os.pathsep.join([str(ROOT), str(SUPPORT)])
"""For processes that import Launcher and modules of this folder."""

SMALL_DIGITS = str(SUPPORT / "small_digits.gin")
"""A recipe of two layers, for tests whose subject is not the network."""
