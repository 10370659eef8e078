"""A stand-in for a worker: reports a step twice a second and does nothing else. For `growth.py supervisor`."""

from __future__ import annotations

import itertools
import os
import time

from launcher.worker.progress import Progress

progress = Progress(os.environ)
for step in itertools.count():
    progress.report(phase="train", step=step)
    time.sleep(0.5)
