"""History that `launcher.fit` returns: Keras's, and the run's report."""

from __future__ import annotations

import dataclasses
import html
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


@dataclasses.dataclass(frozen=True)
class Report:
    """A report of a run, which a notebook shows below the cell: the whole page, and none of its files."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 45em; border: 0"></iframe>'
