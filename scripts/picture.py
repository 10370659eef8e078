#!/usr/bin/env python3
"""Makes docs/pictures/resume.svg, the README's terminal: a training is killed, goes on, and ends with the same weights.

    pip install pyte
    python scripts/picture.py [FILE.svg]

It really runs: the README's program trains in a temporary folder, once untouched and once in a terminal of its own,
where it is killed by SIGKILL, started again, and compared. Only waiting is shortened. Ends with 1, and writes nothing,
if the two checkpoints differ. Takes a minute or two.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 126, 25
SEEN = 112  # columns that the picture shows: letters are as much larger
CELL, LINE, SIZE = 8.0, 17, 13  # pixels
PAD, BAR = 14, 34
LONGEST_WAIT = 0.5  # seconds that nothing may move in the picture
FRAME = 0.12  # seconds that a frame stands at least
PROMPT = "$ "
TRAIN = "launcher --gin_file=mine.py"
COMPARE = "md5sum runs/*/checkpoints/step_00000470/state.data*"
CAPTIONS = (
    "a training that ends in its middle: kill -9 from another terminal",
    "the same command goes on from the last checkpoint",
    "the same bytes as a run that nobody touched",
)
COLOURS = {"default": "#d6deeb", "brightblack": "#7f8c9b", "brown": "#e2b86b", "red": "#ff7b72", "green": "#7ee787"}


class Frame(NamedTuple):
    """What is seen from a time on: rows of runs of (column, text, colour, bold)."""

    seconds: float
    rows: tuple[tuple[tuple[int, str, str, bool], ...], ...]
    caption: int


class Terminal:
    """A shell in a terminal of its own, whose screen is kept frame by frame."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        import pyte  # not needed by anything else

        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.frames: list[Frame] = []
        self.caption = 0
        self.shown = 0.0  # seconds in the picture
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env={**environ, "PS1": PROMPT, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)
        self.master = master

    def type(self, command: str) -> None:
        for letter in f"{command}\n":
            os.write(self.master, letter.encode())
            self.watch(0.03)

    def watch(self, seconds: float) -> None:
        """Keeps what is printed within the seconds."""
        end = time.monotonic() + seconds
        last = time.monotonic()
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self.master], [], [], left)
            if ready:
                self.stream.feed(os.read(self.master, 65536))
            now = time.monotonic()
            self.shown += min(now - last, LONGEST_WAIT)
            last = now
            self.keep()

    def until(self, done: Callable[[], bool], seconds: float = 120) -> None:
        """Keeps what is printed until the condition holds."""
        end = time.monotonic() + seconds
        still = 0.0  # seconds without anything new
        while not done():
            if time.monotonic() > end:
                sys.exit(f"error: not within {seconds:.0f} s; the screen:\n" + "\n".join(self.screen.display))
            ready, _, _ = select.select([self.master], [], [], 0.05)
            if ready:
                before = self.screen.display
                self.stream.feed(os.read(self.master, 65536))
                spins = _without_clock(before) == _without_clock(self.screen.display)
                still = still + 0.05 if spins else 0.0
            else:
                still += 0.05
            if still < LONGEST_WAIT:
                self.shown += 0.05
                self.keep()

    def at_prompt(self) -> bool:
        return self.screen.display[self.screen.cursor.y].rstrip() == PROMPT.rstrip()

    def keep(self) -> None:
        rows = tuple(tuple(_runs(self.screen.buffer[y])) for y in range(ROWS))
        if self.frames and self.frames[-1].rows == rows and self.frames[-1].caption == self.caption:
            return
        if self.frames and self.shown - self.frames[-1].seconds < FRAME:
            self.frames[-1] = Frame(self.frames[-1].seconds, rows, self.caption)
        else:
            self.frames.append(Frame(self.shown, rows, self.caption))

    def close(self) -> None:
        os.close(self.master)
        self.shell.wait()


def _without_clock(display: list[str]) -> str:
    return re.sub(r"\d+:\d\d|[╸╺━]", "", "\n".join(display))


def _runs(line) -> Iterator[tuple[int, str, str, bool]]:
    """Letters of one kind that stand beside each other."""
    x = 0
    while x < SEEN:
        cell = line[x]
        colour = f"#{cell.fg}" if re.fullmatch(r"[0-9a-f]{6}", cell.fg) else COLOURS.get(cell.fg, COLOURS["default"])
        start, text = x, ""
        while x < SEEN and (line[x].fg, line[x].bold) == (cell.fg, cell.bold):
            text += line[x].data
            x += 1
        if text.strip():
            left = len(text) - len(text.lstrip())
            yield start + left, text.strip(), colour, cell.bold


# ------------------------------------------------------------------------------------------------------------- the run


def program() -> str:
    """The first program of the README."""
    return re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)[1]


def record(folder: Path) -> tuple[list[Frame], float]:
    """The frames, and the seconds of all of them."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    launcher = bin_folder / "launcher"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m launcher.main "$@"\n')
    launcher.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    (work / "mine.py").write_text(program(), "utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TF_", "SLURM_"))}
    environ |= {"PATH": f"{bin_folder}:{environ['PATH']}", "PYTHONPATH": str(ROOT)}
    untouched = [*TRAIN.split(), "--model_dir=runs/untouched"]
    subprocess.run(untouched, cwd=work, env=environ, check=True, stdout=subprocess.DEVNULL)

    terminal = Terminal(work, environ)
    terminal.until(terminal.at_prompt, 10)
    terminal.type(TRAIN)
    metrics, lease = work / "runs/mine/metrics.jsonl", work / "runs/mine/lease.json"
    terminal.until(lambda: metrics.is_file() and '"step": 270' in metrics.read_text("utf-8"))
    os.kill(json.loads(lease.read_text("utf-8"))["process"], signal.SIGKILL)
    terminal.until(terminal.at_prompt)
    terminal.watch(2.0)
    terminal.caption = 1
    terminal.type("clear")
    terminal.type(TRAIN)
    terminal.until(lambda: (work / "runs/mine/summary.json").is_file() and terminal.at_prompt())
    terminal.watch(1.5)
    terminal.caption = 2
    terminal.type(COMPARE)
    terminal.until(terminal.at_prompt)
    terminal.watch(0.2)
    end = terminal.shown + 4
    terminal.close()
    sums = re.findall(r"^([0-9a-f]{32})  runs/", "\n".join(terminal.screen.display), re.MULTILINE)
    if "Killed" not in str(terminal.frames):  # the shell says so behind what stood in its line
        sys.exit("error: the picture would not show that the training was killed: run it again")
    if len(sums) != 2 or len(set(sums)) != 1:
        sys.exit("error: the checkpoints differ:\n" + "\n".join(terminal.screen.display))
    return terminal.frames, end


# ---------------------------------------------------------------------------------------------------------- the picture


def drawn(frames: list[Frame], seconds: float) -> str:
    """An SVG that shows the frames one after another, for ever; the last one alone where nothing may move."""
    spans: dict[tuple, list[tuple[float, float]]] = {}  # what is seen in a row, and when
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        until = following.seconds if following else seconds
        seen = [(y, runs) for y, runs in enumerate(frame.rows) if runs] + [(ROWS, frame.caption)]
        for one in seen:
            times = spans.setdefault(one, [])
            if times and times[-1][1] == frame.seconds:
                times[-1] = (times[-1][0], until)
            else:
                times.append((frame.seconds, until))
    names: dict[tuple, str] = {}
    parts, rules = [], []
    for (y, what), times in sorted(spans.items(), key=lambda item: item[1][0]):
        key = tuple(times)
        if key not in names:
            names[key] = f"k{len(names)}"
            rules.append(_keyframes(names[key], times, seconds))
        last = times[-1][1] == seconds
        name = names[key]
        text = _caption(what) if y == ROWS else _row(y, what)
        parts.append(f'<g class="f{" l" if last else ""}" style="animation-name:{name}">{text}</g>')
    width, height = round(SEEN * CELL + 2 * PAD), ROWS * LINE + BAR + 2 * PAD
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>A terminal: a training is killed, the same command goes on, and the weights are those of an untouched run</title>
<!-- Made by scripts/picture.py from a run. -->
<style>
text{{font:{SIZE}px {font};white-space:pre;fill:{COLOURS["default"]}}}
.b{{font-weight:bold}} .c{{fill:#e2b86b}}
.f{{opacity:0;animation:{seconds:.2f}s step-end infinite}} .l{{opacity:1}}
@media (prefers-reduced-motion:reduce){{.f{{animation:none!important}}}}
{"".join(rules)}
</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="#10161f" stroke="#56616f"/>
<line x1="0" x2="{width}" y1="{height - BAR}" y2="{height - BAR}" stroke="#56616f"/>
{"".join(parts)}
</svg>
"""


def _keyframes(name: str, times: list[tuple[float, float]], seconds: float) -> str:
    marks = ["0%{opacity:0}"] if times[0][0] > 0 else []
    for start, end in times:
        marks.append(f"{100 * start / seconds:.2f}%{{opacity:1}}")
        marks.append(f"{100 * end / seconds:.2f}%{{opacity:{int(end == seconds)}}}")
    return f"@keyframes {name}{{{''.join(marks)}}}\n"


def _row(y: int, runs: tuple[tuple[int, str, str, bool], ...]) -> str:
    """Each run is as wide as its cells are, whatever the font."""
    drawn_runs = []
    for x, text, colour, bold in runs:
        style = f' style="fill:{colour}"' if colour != COLOURS["default"] else ""
        place = f'x="{PAD + x * CELL:g}" y="{PAD + (y + 1) * LINE - 4}" textLength="{len(text) * CELL:g}"'
        kind = ' class="b"' if bold else ""
        drawn_runs.append(
            f'<text {place} lengthAdjust="spacingAndGlyphs"{kind}{style}>{html.escape(text, quote=False)}</text>'
        )
    return "".join(drawn_runs)


def _caption(number: int) -> str:
    y = ROWS * LINE + 2 * PAD + BAR - 12
    return f'<text class="c" x="{PAD}" y="{y}">{number + 1}. {CAPTIONS[number]}</text>'


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    with tempfile.TemporaryDirectory() as scratch:
        taken, length = record(Path(scratch))
    target = Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs/pictures/resume.svg")
    target.write_text(drawn(taken, length), "utf-8")
    print(f"{target}: {len(taken)} frames, {length:.0f} s, {target.stat().st_size / 1000:.0f} kB")
