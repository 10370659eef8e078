"""Which checkpoint evaluated best so far: one small record beside the checkpoints."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from launcher.checkpoints.disk import WRITING, aside, remove, sync, write_durably
from launcher.checkpoints.errors import read_error, write_error
from launcher.machine import regular_file

_FILE = "best.json"

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The step of the checkpoint that evaluated best so far, and the metric it was judged by."""

    step: int
    metric: str
    value: float


def read_best(directory: Path) -> Best | None:
    """What `write_best` recorded last; a damaged record is a warning and None, and one that cannot be read an error."""
    path = directory / _FILE
    try:
        record = json.loads(regular_file.read(path))
        return Best(step=int(record["step"]), metric=str(record["metric"]), value=float(record["value"]))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _logger.warning("Ignoring the damaged record of the best checkpoint %s: %r.", path, error)
    return None


def write_best(directory: Path, best: Best) -> None:
    """Replaces the record, as `write_record`."""
    record = {**dataclasses.asdict(best), "time": time.time()}
    write_record(directory / _FILE, record, f"the record of the best checkpoint (step {best.step})")


def forget_best(directory: Path) -> None:
    """Removes the record, where its checkpoint is going to be removed."""
    remove(directory / _FILE)


def write_record(path: Path, record: Any, what: str) -> None:
    """Replaces a small file of JSON durably and at once; CheckpointWriteError where `what` could not be written."""
    temporary, content = aside(WRITING, path), json.dumps(record).encode()
    try:
        write_durably(temporary, content)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        remove(temporary)
        raise write_error(what, temporary, len(content), error) from error
