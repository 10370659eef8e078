"""`--mode=compare`: several runs beside one another, from the files in their folders. Imports no TensorFlow."""

import os

from launcher.errors import EXIT_DONE, UsageError
from launcher.modes import CompareRequest
from launcher.reporting import comparison, run_folder
from launcher.reporting.console import make_console, show_table


def run(request: CompareRequest) -> int:
    """Prints the table of what differs and writes compare.html."""
    if len(request.run) < 2:
        raise UsageError("--mode=compare: name two folders or more, such as runs/one runs/other")
    folders = [run_folder.read(path) for path in request.run]
    for path, folder in zip(request.run, folders, strict=True):
        if not folder.is_run:
            what = "nothing of a run is in it" if os.path.isdir(path) else "there is no such folder"
            raise UsageError(f"--mode=compare: {path}: {what}; name the folder that a run wrote to")
    show(comparison.ComparedRuns.of(folders), request.model_dir or ".", dry_run=request.dry_run)
    return EXIT_DONE


def show(compared: comparison.ComparedRuns, folder: str, *, most: int | None = None, dry_run: bool = False) -> None:
    """Prints the table, of so many runs at most, and writes the page of all."""
    show_table([row[: most and most + 1] for row in compared.rows()], make_console(total_steps=1))
    target = os.path.join(folder, comparison.FILE_NAME)
    if dry_run:
        print(f"would write {target}")
        return
    try:
        print(f"written: {compared.write(folder)}")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}; choose another --model_dir") from None
