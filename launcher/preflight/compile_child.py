"""The child process in which a compiler of XLA runs: it may take all memory, hang or abort, and harm nobody else.

python -m launcher.preflight.compile_child FOLDER, where FOLDER has what `compiler` put there
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

from launcher.errors import EXIT_DONE
from launcher.machine import child_process
from launcher.preflight.xla_compiler import BEFORE_LIBRARIES

REQUEST, PROGRAM, OUTCOME, DUMP, LOG = "request.json", "program.mlir", "outcome.json.gz", "dump", "log.txt"


def main(argv: list[str]) -> int:
    """Compiles what the folder asks for and leaves the outcome there."""
    child_process.follow_parent()
    folder = Path(argv[1])
    request = json.loads((folder / REQUEST).read_text("utf-8"))
    del request["xla_flags"]  # which XLA found in the environment
    outcome = _compile(folder, request)
    partial = folder / f"{OUTCOME}.partial"
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(outcome, file)
    partial.rename(folder / OUTCOME)
    return EXIT_DONE


def _compile(folder: Path, request: dict) -> dict:
    from launcher.preflight import xla_compiler

    outcome: dict = {"error": None, "unsupported": None, "memory": {}, "cost": {}, "hlo": ""}
    started = time.monotonic()
    try:
        made = xla_compiler.compile_program((folder / PROGRAM).read_text("utf-8"), **request)
        outcome |= {"memory": made.memory, "cost": made.cost, "hlo": made.hlo}
    except xla_compiler.CompileError as error:
        outcome["error"] = str(error)
    except xla_compiler.UnsupportedVersionError as error:
        outcome["unsupported"] = str(error)
    outcome["seconds"] = time.monotonic() - started
    outcome |= _dumped(folder / DUMP, outcome["hlo"])
    if (
        outcome["error"] is None
        and outcome["unsupported"] is None
        and not (outcome["hlo"] and outcome["buffer_assignment"])
    ):
        outcome["unsupported"] = "it left no optimised program, or not where its buffers lie"
    return outcome


def _dumped(folder: Path, hlo: str) -> dict[str, str]:
    """What XLA wrote of the program, also of one that does not fit; empty text where it wrote nothing."""

    def text(*endings: str) -> str:
        found = [path for ending in endings for path in sorted(folder.glob(f"*{ending}"))]
        return found[0].read_text("utf-8", errors="replace") if found else ""

    # A GPU's have "_gpu" in front.
    return {
        "hlo": hlo or text("[._]after_optimizations.txt", ".oom_intermediate_module.txt"),
        "buffer_assignment": text("[._]after_optimizations-buffer-assignment.txt"),
        "live_ranges": text("[._]after_optimizations-live-range.txt"),
        "before_libraries": text(BEFORE_LIBRARIES, ".before_optimizations.txt") if not hlo else "",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv))
