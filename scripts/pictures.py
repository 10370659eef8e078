"""Pictures of what people see: a command's terminal, and pages by headless Chromium.

    python scripts/pictures.py terminal --columns=110 shown.html -- python -m launcher.main --gin_file=resnet_cpu.gin
    python scripts/pictures.py shoot shown.html shown.png --width=980

`terminal` runs the command on a pseudo-terminal and writes what it left on the screen as HTML, with its colours; the
bytes as they came stand beside it, with the ending .ansi. `kill` runs a supervised job and kills its last worker with
SIGKILL once after each of the steps given. `shoot` needs Chromium and Pillow, `kill` psutil.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

_PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")
_FONT = "font: 14px/1.2 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_TALLEST = 6000


def run_on_terminal(command: list[str], columns: int) -> tuple[str, int]:
    """What a command wrote to a terminal of so many columns, and its exit code."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=environ, close_fds=True
    )
    os.close(follower)
    received = bytearray()
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the last holder of the other end is gone
            break
        if not piece:
            break
        received += piece
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    os.close(leader)
    return received.decode("utf-8", "replace"), process.wait()


def left_on_screen(text: str) -> list[str]:
    """The lines that remain once erased and rewritten ones are gone; colours stay in them.

    Raises:
        ValueError: something moves the cursor in a way that is not known here.
    """
    rows, row = [""], 0
    for found in _PIECES.finditer(text):
        number, letter, end, words = found.groups()
        if words is not None:
            rows[row] += words
        elif end in ("\n", "\r\n"):
            row += 1
            rows += [""] * (row == len(rows))
        elif end == "\r":
            # A terminal's own "\r\n" comes as "\r\r\n"; what is written over must have been erased.
            rest = text[found.end() :]
            if rows[row] and not rest.startswith(("\r", "\n", "\x1b[2K")):
                raise ValueError(f"{rows[row]!r} is written over by {rest[:40]!r}")
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K":
            rows[row] = ""
        elif letter == "m":
            rows[row] += found.group()
        elif not (letter in "hl" and number.startswith("?")):  # showing and hiding the cursor
            raise ValueError(f"{found.group()!r} is not known")
    while rows and not re.sub(r"\x1b\[[0-9;]*m", "", rows[-1]).strip():
        rows.pop()
    return rows


def screen_page(command: str, rows: list[str], columns: int) -> str:
    """A page that shows the rows as a terminal does."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    plain = [(48, 57, 69), (255, 122, 110), (76, 195, 138), (226, 179, 64)]
    plain += [(110, 168, 254), (227, 138, 224), (84, 208, 219), (228, 232, 237)]
    theme = TerminalTheme((18, 22, 28), (228, 232, 237), plain, plain)
    console = Console(record=True, width=max(columns, 1), file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")), soft_wrap=True)
    for row in rows:
        console.print(Text.from_ansi(row), soft_wrap=True)
    style = (
        f"margin:0;padding:18px 22px;{_FONT};white-space:pre-wrap;word-break:break-all;width:calc({columns}ch + 8px)"
    )
    code = f'<pre style="{style}">{{code}}</pre>'
    body = console.export_html(theme=theme, inline_styles=True, code_format=code)
    return (
        '<!DOCTYPE html><meta charset="utf-8"><body style="margin:0;background:#12161c;color:#e4e8ed">'
        + body
        + "</body>"
    )


def shoot(source: Path, target: Path, *, width: int, dark: bool, ratio: float, height: int, colors: int) -> None:
    """A picture of a page, without the empty rows at its end; or, where the target ends in .pdf, its print."""
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=4000",
    ]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    with tempfile.TemporaryDirectory() as folder:
        command += [f"--user-data-dir={folder}/profile"]
        if target.suffix == ".pdf":
            command += ["--no-pdf-header-footer", f"--print-to-pdf={target}"]
        else:
            shot = Path(folder, "shot.png")
            command += [
                f"--force-device-scale-factor={ratio}",
                f"--window-size={width},{height}",
                f"--screenshot={shot}",
            ]
        subprocess.run([*command, source.absolute().as_uri()], check=True, capture_output=True, timeout=120)
        if target.suffix != ".pdf":
            _trimmed(shot, target, colors=colors)


def _trimmed(shot: Path, target: Path, *, colors: int) -> None:
    from PIL import Image, ImageChops

    picture = Image.open(shot).convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((2, picture.height - 2)))
    box = ImageChops.difference(picture, empty).getbbox()
    if box is not None:
        picture = picture.crop((0, 0, picture.width, min(picture.height, box[3] + 24)))
    picture.quantize(colors, dither=Image.Dither.NONE).save(target, optimize=True)


def kill_workers(model_dir: Path, steps: list[int], command: list[str]) -> int:
    """Runs a job, kills a worker after each of the steps has been logged, and returns the job's exit code."""
    import psutil

    job = subprocess.Popen(command)
    for step in steps:
        while job.poll() is None and _newest_step(model_dir) < step:
            time.sleep(0.05)
        family = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        workers = [one for one in family if "launcher.main" in one.cmdline()]
        for worker in sorted(workers, key=lambda one: one.pid)[-1:]:
            worker.kill()
            worker.wait()
    return job.wait()


def _newest_step(model_dir: Path) -> int:
    try:
        return int(json.loads((model_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    except (OSError, ValueError, IndexError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    terminal = verbs.add_parser("terminal")
    terminal.add_argument("--columns", type=int, default=110)
    terminal.add_argument("--shown", help="the command as the picture shows it")
    terminal.add_argument("page", type=Path)
    killed = verbs.add_parser("kill")
    killed.add_argument("model_dir", type=Path)
    killed.add_argument("steps", type=lambda text: [int(step) for step in text.split(",")])
    of_page = verbs.add_parser("shoot")
    of_page.add_argument("page", type=Path)
    of_page.add_argument("picture", type=Path)
    of_page.add_argument("--width", type=int, default=1180)
    of_page.add_argument("--height", type=int, default=_TALLEST)
    of_page.add_argument("--ratio", type=float, default=1.0)
    of_page.add_argument("--colors", type=int, default=96)
    of_page.add_argument("--dark", action="store_true")
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:place]), words[place + 1 :]
    if options.verb == "shoot":
        shoot(
            options.page, options.picture, width=options.width, dark=options.dark, ratio=options.ratio,
            height=options.height, colors=options.colors,
        )  # fmt: skip
        return 0
    if not command:
        parser.error("give the command after --")
    if options.verb == "kill":
        return kill_workers(options.model_dir, options.steps, command)
    text, code = run_on_terminal(command, options.columns)
    options.page.with_suffix(".ansi").write_text(text, encoding="utf-8")
    shown = options.shown or shlex.join(command)
    options.page.write_text(screen_page(shown, left_on_screen(text), options.columns), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
