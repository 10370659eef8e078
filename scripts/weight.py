"""Tokens of code, lines, docstring lines and files of each room, the heaviest first.

    python scripts/weight.py             # launcher and models of this checkout
    python scripts/weight.py launcher/step models

Tokens are Python's own (`tokenize`), without comments, docstrings, line ends and indents: a denser line weighs as much.
"""

from __future__ import annotations

import ast
import collections
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def weight(source: str) -> tuple[int, int, int, int]:
    """Tokens of code, lines and docstring lines of a module's text, and 1 for the file."""
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _DOCUMENTED)]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node, clean=False) is not None]
    starts = {(docstring.lineno, docstring.col_offset) for docstring in docstrings}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = sum(token.type not in _NO_CODE and token.start not in starts for token in tokens)
    lines_of_docstrings = sum((docstring.end_lineno or 0) - docstring.lineno + 1 for docstring in docstrings)
    return code, len(source.splitlines()), lines_of_docstrings, 1


def main(tops: list[str]) -> None:
    root = Path(__file__).resolve().parent.parent
    rooms: collections.defaultdict[str, list[int]] = collections.defaultdict(lambda: [0] * 4)
    for path in (path for top in tops for path in (root / top).rglob("*.py")):
        room = "/".join(path.relative_to(root).parent.parts[:2])
        for name in (room, "all"):
            rooms[name] = [sum(pair) for pair in zip(rooms[name], weight(path.read_text()), strict=True)]
    print(f"{'':26}{'tokens':>8}{'lines':>8}{'docstrings':>12}{'files':>7}")
    for name, counts in sorted(rooms.items(), key=lambda item: -item[1][0]):
        print(f"{name:26}{counts[0]:8,}{counts[1]:8,}{counts[2]:12,}{counts[3]:7,}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["launcher", "models"])
