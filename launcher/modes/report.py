"""`--mode=report`: report.html of any folder, from the files in it. Imports no TensorFlow."""

import os

from launcher.errors import EXIT_DONE, UsageError
from launcher.modes import Request
from launcher.reporting import report, run_folder


def run(request: Request) -> int:
    """Writes the page and prints where it is."""
    if request.model_dir is None and not request.gin_file:
        raise UsageError("--mode=report: say of which folder, such as --model_dir=runs/resnet_cpu")
    folder = run_folder.read_run(request.run_dir, f"--model_dir={request.run_dir}")
    if request.dry_run:
        print(f"would write {os.path.join(request.run_dir, report.FILE_NAME)}")
    else:
        print(f"written: {report.write_result(folder.path, report.FILE_NAME, report.make_page(folder))}")
    return EXIT_DONE
