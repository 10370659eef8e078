"""TensorBoard event files: runs "train", "eval" and "precision", the same tag in the first two, so that curves overlay.

The events are written with `tf.io.TFRecordWriter` rather than through `tf.summary`: only so can a resumed run mark
where it goes on (`SessionLog.START`, on which TensorBoard forgets the later points of the earlier attempt).
"""

import base64
import contextlib
import os
import re
import socket
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.reporting import strict_json
from launcher.reporting.sinks import PICTURE, RunStart, Samples, Sink
from launcher.reporting.strict_json import Record

_protobuf = tf.compat.v1  # where TensorFlow has the classes of TensorBoard's records
_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class TensorBoard(Sink):
    """Writes scalars to DIR/train, DIR/eval and DIR/precision; every event is flushed.

    The samples of evaluations go to DIR/eval as texts and images. With the first event go the plan and the
    configuration as text and, where the package `tensorboard` is installed, the hyperparameters.

    It is a copy of metrics.jsonl for the eyes, so a failure to write is the end of the copy, not of the training; see
    `Sink`.
    """

    def __init__(self, directory: str, *, clock: Callable[[], float] = time.time):
        self._directory = Path(directory)
        self._clock = clock
        self._writers: dict[str, Any] = {}
        self._start: RunStart | None = None

    def started(self, run: RunStart) -> None:
        self._start = run

    def measured(self, split: str, event: Record) -> None:
        self._add(split, int(event["step"]), _scalars(event))

    def samples(self, step: int, rows: Samples) -> None:
        """Writes a table of texts; pictures stand above it, in the order of its rows."""
        pictures = [base64.b64decode(given.removeprefix(PICTURE)) for given, *_ in rows if given.startswith(PICTURE)]
        shown = [(str(number), *row[1:]) for number, row in enumerate(rows, start=1)] if pictures else rows
        values = [_text("samples", _table(["given", "the model's", "expected"], shown))]
        self._add("eval", step, [*values, *([_images("pictures", pictures)] if pictures else [])])

    def precision(self, event: Record, exponents: Record) -> None:
        """Writes the numbers of an event, and by tag how many values there are of each float32 exponent, 256 bins."""
        numbers = {name: value for name, value in event.items() if not isinstance(value, str | Mapping)}
        histograms = [
            _protobuf.Summary.Value(tag=f"exponents/{name}", histo=_histogram(counts))
            for name, counts in exponents.items()
        ]
        self._add("precision", int(event["step"]), [*_scalars(numbers), *histograms])

    def truncate_after(self, step: int) -> None:
        """Makes TensorBoard forget what an earlier attempt logged past `step`."""
        start = _protobuf.SessionLog(status=_protobuf.SessionLog.START)
        for run in ("train", "eval", "precision"):
            if (self._directory / run).is_dir():
                self._record(run, step=step + 1, session_log=start)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, run: str, step: int, values: Sequence[Any]) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            config = textwrap.indent(start.config, "    ")
            texts = [_text("plan", _table(["", ""], start.plan.items())), _text("config", config)]
            self._record(run, step=start.step, summary=_protobuf.Summary(value=texts))
            with contextlib.suppress(ImportError):
                from tensorboard.plugins.hparams import api

                hyperparameters = api.hparams_pb(start.hyperparameters, trial_id=start.model_dir).SerializeToString()
                self._record(run, step=start.step, summary=_protobuf.Summary.FromString(hyperparameters))
        self._record(run, step=step, summary=_protobuf.Summary(value=values))

    def _record(self, run: str, **fields: Any) -> None:
        if run not in self._writers:
            self._writers[run] = tf.io.TFRecordWriter(str(self._new_file(run)))
            version = _protobuf.Event(wall_time=self._clock(), file_version="brain.Event:2")
            self._writers[run].write(version.SerializeToString())
        self._writers[run].write(_protobuf.Event(wall_time=self._clock(), **fields).SerializeToString())
        self._writers[run].flush()

    def _new_file(self, run: str) -> Path:
        """Names a file that sorts behind all others, the order in which TensorBoard reads them."""
        folder = self._directory / run
        folder.mkdir(parents=True, exist_ok=True)
        used = [int(match[1]) for match in map(_FILE.fullmatch, os.listdir(folder)) if match]
        stamp = max([int(self._clock()), *(seconds + 1 for seconds in used)])
        return folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.v2"


def _scalars(event: Record) -> list[Any]:
    return [
        _protobuf.Summary.Value(tag=name, simple_value=strict_json.number(value))
        for name, value in event.items()
        if name != "step"
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _text(tag: str, markdown: str) -> Any:
    return _of_plugin("text", tag, [markdown])


def _images(tag: str, pictures: Sequence[bytes]) -> Any:
    """PNGs of one size, for TensorBoard's page of images; each says its width and height in its header."""
    width, height = (str(int.from_bytes(pictures[0][at : at + 4], "big")).encode() for at in (16, 20))
    return _of_plugin("images", tag, [width, height, *pictures])


def _of_plugin(plugin: str, tag: str, strings: Sequence[str | bytes]) -> Any:
    metadata = _protobuf.SummaryMetadata(plugin_data=_protobuf.SummaryMetadata.PluginData(plugin_name=plugin))
    return _protobuf.Summary.Value(tag=tag, metadata=metadata, tensor=tf.make_tensor_proto(strings))


def _histogram(counts: Any) -> Any:
    """TensorBoard's histogram of the exponents of finite values that are not zero; bin e has the exponent e - 127."""
    found = np.flatnonzero(counts[1:-1]) + 1
    if not len(found):
        return _protobuf.HistogramProto()
    bins = np.arange(found[0], found[-1] + 1)
    values, numbers = bins - 127.0, np.asarray(counts, np.float64)[bins]
    return _protobuf.HistogramProto(
        min=values[0],
        max=values[-1] + 1,
        num=numbers.sum(),
        sum=(numbers * values).sum(),
        sum_squares=(numbers * values**2).sum(),
        bucket_limit=values + 1,
        bucket=numbers,
    )
