"""`--mode=compare`: several runs beside one another, from the files in their folders. Imports no TensorFlow."""

import os

from launcher.errors import EXIT_DONE, UsageError
from launcher.modes import CompareRequest
from launcher.reporting import comparison, report, run_folder
from launcher.reporting.console import make_console, show_table


def run(request: CompareRequest) -> int:
    """Prints the table of what differs and writes compare.html."""
    if len(request.run) < 2:
        raise UsageError("--mode=compare: name two folders or more, such as runs/one runs/other")
    folders = [run_folder.read_run(path, f"--mode=compare: {path}") for path in request.run]
    compared = comparison.ComparedRuns.of(folders)
    show_table(compared.rows(), make_console(total_steps=1))  # the page has all
    folder = request.model_dir or "."
    if request.dry_run:
        print(f"would write {os.path.join(folder, comparison.FILE_NAME)}")
    else:
        print(f"written: {report.write_result(folder, comparison.FILE_NAME, compared.page())}")
    return EXIT_DONE
