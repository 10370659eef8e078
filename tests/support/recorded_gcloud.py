"""A stand-in for gcloud on PATH: notes its arguments as JSON lines and answers from a table; anything else is refused.

In the table, `words: answers` means: a call whose arguments begin with `words` gets the next of `answers`, the last one
again and again. An answer is (exit code, standard output, standard error).
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

SCRIPT = f"""#!{sys.executable}
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
arguments = sys.argv[1:]
with open(folder / "gcloud.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
for index, (words, answers) in enumerate(json.loads((folder / "gcloud.json").read_text())):
    if arguments[:len(words)] == words:
        count = folder / f"gcloud.{{index}}"
        turn = int(count.read_text()) if count.exists() else 0
        count.write_text(str(turn + 1))
        code, out, err = answers[min(turn, len(answers) - 1)]
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
sys.stderr.write(f"unexpected: gcloud {{' '.join(arguments)}}\\n")
sys.exit(99)
"""

NODE = ("compute", "tpus", "tpu-vm")
QUEUED = ("compute", "tpus", "queued-resources")
NOT_FOUND = (1, "", "ERROR: (gcloud.compute.tpus) NOT_FOUND: Resource 'projects/p/...' was not found\n")


def documented(text: str) -> list[str]:
    """A command as a page shows it."""
    return shlex.split(text.replace("\\\n", " "))[1:]


def says(text: str) -> tuple[int, str, str]:
    """The answer of a call that prints a line."""
    return 0, f"{text}\n", ""


class Gcloud:
    """The stand-in in `folder`, which is to come first on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gcloud").write_text(SCRIPT)
        (folder / "gcloud").chmod(0o755)
        self.answers({})

    def answers(self, table):
        """Sets what it answers."""
        rows = [[list(words), list(answers)] for words, answers in table.items()]
        (self.folder / "gcloud.json").write_text(json.dumps(rows))

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of every call, in order."""
        path = self.folder / "gcloud.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def changes(self) -> list[list[str]]:
        """Those that do more than ask."""
        asking = {"describe", "list", "ls", "cat"}
        return [call for call in self.calls if not asking & set(call[:5])]
