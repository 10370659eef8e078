"""Refuses what `launcher.main` would refuse of a command line before it looks for devices and data: exit 64, and why.

    python scripts/check_flags.py --gin_file=resnet_tpu.gin --gin_param='train.steps = 30'

Flags, recipes and bindings are looked at by this checkout, for a machine that is about to be paid for. Exit 3: there is
a recipe among them that only that machine has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launcher import main, modes
from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, LauncherError

EXIT_ELSEWHERE = 3


def check(argv: Sequence[str]) -> int:
    """The exit code for the flags; raises LauncherError where one is wrong."""
    request = modes.make_request(main.parse(["launcher.main", *argv]))
    if any(os.path.isabs(name) and not os.path.exists(name) for name in request.gin_file):
        return EXIT_ELSEWHERE
    from launcher.run import loading, programs  # imports TensorFlow

    program, others = programs.split(request.gin_file)
    with gin_bindings.usage_errors():
        (loading.load_bindings_of_program if program else loading.load_bindings)(others, request.gin_param)
    return EXIT_DONE


if __name__ == "__main__":
    try:
        sys.exit(check(sys.argv[1:]))
    except LauncherError as error:
        sys.stdout.write(f"{error}\n")
        sys.exit(error.exit_code)
