"""Loads a folder of a run, trusted or not, as a program of a user's would, and prints what came of it."""

from __future__ import annotations

import sys

import launcher
from launcher.errors import UsageError

if __name__ == "__main__":
    try:
        print("loaded", launcher.load(sys.argv[1], trust=sys.argv[2:] == ["trust"]).name)
    except UsageError as error:
        print(error)
