"""The child process in which the TPU compiler runs: it may take all memory, hang or abort, and harm nobody else.

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

REQUEST, PROGRAM, OUTCOME, DUMP = "request.json", "program.mlir", "outcome.json.gz", "dump"


def main(argv: list[str]) -> int:
    """Compiles what the folder asks for and leaves the outcome there."""
    child_process.follow_parent()
    folder = Path(argv[1])
    request = json.loads((folder / REQUEST).read_text("utf-8"))
    outcome = _compile(folder, request)
    partial = folder / f"{OUTCOME}.partial"
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(outcome, file)
    partial.rename(folder / OUTCOME)
    return EXIT_DONE


def _compile(folder: Path, request: dict) -> dict:
    from launcher.preflight import tpu_compiler

    outcome: dict = {"error": None, "unsupported": None, "memory": {}, "cost": {}, "hlo": ""}
    started = time.monotonic()
    try:
        made = tpu_compiler.compile_program((folder / PROGRAM).read_text("utf-8"), **request)
        outcome |= {"memory": made.memory, "cost": made.cost, "hlo": made.hlo}
    except tpu_compiler.CompileError as error:
        outcome["error"] = str(error)
    except tpu_compiler.UnsupportedVersionError as error:
        outcome["unsupported"] = str(error)
    outcome["seconds"] = time.monotonic() - started
    return outcome | _dumped(folder / DUMP, outcome["hlo"])


def _dumped(folder: Path, hlo: str) -> dict[str, str]:
    """What XLA wrote of the program, also of one that does not fit; empty text where it wrote nothing."""

    def text(ending: str) -> str:
        found = sorted(folder.glob(f"*{ending}"))
        return found[0].read_text("utf-8", errors="replace") if found else ""

    return {
        "hlo": hlo or text(".after_optimizations.txt") or text(".oom_intermediate_module.txt"),
        "buffer_assignment": text(".after_optimizations-buffer-assignment.txt"),
        "live_ranges": text(".after_optimizations-live-range.txt"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv))
