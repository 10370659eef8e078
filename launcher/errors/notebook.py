"""Whether this process is a notebook's kernel (Jupyter, Colab, Kaggle), and what a notebook calls its cells.

IPython is asked where it has been imported; nothing here imports it.
"""

import re
import sys
from typing import Any

# Before ipykernel 6, and since.
_CELL = re.compile(r"<ipython-input-(\d+)-[^>]*>|\S*[\\/]ipykernel_\d+[\\/]\d+\.py")


def shell() -> Any:
    """IPython's shell where this process is a notebook's kernel; else None, as in a terminal's IPython."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return found if getattr(found, "kernel", None) is not None else None


def is_cell(file: str) -> bool:
    """Whether Python knows the code of a cell by this file name."""
    return _CELL.fullmatch(file) is not None


def with_cells(text: str) -> str:
    """A text in which names of files that stand for cells are what the notebook calls these: In[3]."""
    return _CELL.sub(_label, text)


def _label(found: re.Match[str]) -> str:
    if found[1]:
        return f"In[{found[1]}]"
    kernel = shell()
    if kernel is None:  # as in a worker that a notebook has started; the notebook knows
        return found[0]
    describe = getattr(kernel.compile, "format_code_name", lambda name: None)  # since IPython 8
    return (describe(found[0]) or ("", "a cell"))[1]
