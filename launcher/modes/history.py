"""What `launcher.fit` returns: Keras's History, which a notebook shows as a table, and the run's report."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path

import keras

from launcher.errors import UsageError
from launcher.reporting.report import FILE_NAME


class History(keras.callbacks.History):
    """Keras's History of the epochs of a run.

    Attributes:
      model: the trained model.
      model_dir: the folder of the run; None until it has ended.
    """

    model_dir: str | None = None

    def report(self) -> Report:
        """The run's report.html, to be the last expression of a notebook's cell.

        Raises:
          UsageError: there is none.
        """
        path = Path(self.model_dir or "", FILE_NAME)
        if self.model_dir is None or not path.is_file():
            raise UsageError(f"there is no {path}: the run has not ended, or its folder has moved")
        return Report(path)

    def _repr_html_(self) -> str:
        epochs = [number + 1 for number in self.epoch]
        rows = "".join(map(self._row, self.history))
        heading = f"epoch {epochs[-1]}</th><th>lowest</th><th>highest" if epochs else "no epoch was trained"
        about = f"In <code>{html.escape(str(self.model_dir))}</code>; <code>.report()</code> shows the report."
        return f"<table><tr><th></th><th>{heading}</th></tr>{rows}</table><p>{about}</p>"

    def _row(self, name: str) -> str:
        """The last value of a metric, its lowest and its highest, each with its epoch."""
        values = [float(value) for value in self.history[name]]
        cells = [f"{values[-1]:.4g}"]
        finite = [value for value in values if math.isfinite(value)]
        for extreme in (min(finite), max(finite)) if finite else ():
            cells.append(f"{extreme:.4g} (epoch {self.epoch[values.index(extreme)] + 1})")
        return f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of a run, which a notebook shows below the cell: the whole page, and none of its files."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 45em; border: 0"></iframe>'
