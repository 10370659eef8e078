"""The console: plain lines in pipes, a live line on a terminal, and no reader that could stop a training."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import launcher
from launcher.reporting.console import make_console

PROGRAM = """
import sys
from launcher.reporting.console import make_console
console = make_console(total_steps=400)
console.plan({"strategy": "mirrored [2 replicas]", "batch": "64 = 2 x 32"})
for step in range(100, 401, 100):
    console.train({"step": step, "loss": 1 / step, "accuracy": 0.5, "learning_rate": 0.1, "loss_scale": 2.0**15,
                   "gradient_norm": 1.0, "skipped_steps": 0, "examples_per_second": 1234.5})
    if step == 200:
        console.note("skipped step 150: [bold]not finite[/bold]")
        console.evaluation({"step": step, "loss": 0.25, "accuracy": 0.75})
        print("printed by the user", flush=True)
console.close()
console.closing([("completed", "step 400 of 400 in 0:07"), ("report", "run/report.html")],
                {"export": "python -m launcher.main --mode=export " + "--gin_param='train.steps = 400' " * 4 + "--end"})
print("done", file=sys.stderr if "gone" in sys.argv else sys.stdout)
"""


def environment(**more: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
    root = str(Path(launcher.__file__).parents[1])
    return {**inherited, "PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "3", **more}


def on_a_terminal(program: str = PROGRAM, columns: int = 120, **more: str) -> str:
    """What a program writes to a terminal, of 120 columns unless said."""
    ours, theirs = pty.openpty()
    command, env = [sys.executable, "-c", program], environment(COLUMNS=str(columns), **more)
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        written = b"".join(iter(lambda: read_or_end(ours), b""))
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def read_or_end(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says EIO when the other side has closed.
        return b""


def in_a_pipe(*arguments: str, **more: str) -> str:
    return subprocess.check_output([sys.executable, "-c", PROGRAM, *arguments], env=environment(**more), text=True)


def seconds(*readings: float) -> Iterator[float]:
    yield from readings


def test_a_pipe_gets_plain_lines_without_escapes() -> None:
    # FORCE_COLOR and a capable TERM must not talk us into escapes.
    written = in_a_pipe(TERM="xterm-256color", FORCE_COLOR="1")
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f]", written) is None
    lines = written.splitlines()
    assert lines[:2] == ["strategy  mirrored [2 replicas]", "batch     64 = 2 x 32"]
    assert lines[2] == "step 100/400  loss 0.01  accuracy 0.5  1,234 examples/s  loss scale 32768"
    assert re.fullmatch(r"step 200/400  loss 0\.005  accuracy 0\.5  1,234 .*  ETA 0:0\d", lines[3])
    assert lines[4] == "skipped step 150: [bold]not finite[/bold]"
    assert lines[5] == "evaluation at step 200  loss 0.25  accuracy 0.75"
    assert lines[6] == "printed by the user"
    assert [line.split()[1] for line in lines[7:9]] == ["300/400", "400/400"]
    assert lines[9:11] == ["completed  step 400 of 400 in 0:07", "report     run/report.html"]
    assert lines[11] == "export:" and lines[12].endswith("--end") and lines[13:] == ["done"]


def test_a_terminal_gets_one_live_line_and_the_rest_scrolls_above() -> None:
    written = on_a_terminal(TERM="xterm-256color")
    assert "\x1b[2K" in written  # The line is erased and drawn again.
    screen = [line.rstrip() for line in screen_of(written)]
    assert any("strategy" in line and "mirrored [2 replicas]" in line for line in screen)
    progress = [line for line in screen if "/400" in line]
    assert len(progress) == 1, screen
    assert "step 400/400  loss 0.0025  accuracy 0.5  1,234 examples/s  loss scale 32768" in progress[0]
    scrolled = ["skipped step 150: [bold]not finite[/bold]", "evaluation at step 200  loss 0.25  accuracy 0.75"]
    where = [screen.index(line) for line in [*scrolled, "printed by the user", progress[0], "done"]]
    assert where == sorted(where)
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # The cursor is visible at the end.


NARROW = """
from launcher.reporting.console import make_console
console = make_console(total_steps=100000, clock=iter(range(0, 10000, 1000)).__next__)
for step in (12000, 13000):
    console.train({"step": step, "loss": 2.25, "accuracy": 0.5, "top5": 0.75, "loss_scale": 2.0**15,
                   "examples_per_second": 1234.5})
console.close()
"""


def test_a_narrow_terminal_keeps_speed_and_time_to_go() -> None:
    wide, narrow = (screen_of(on_a_terminal(NARROW, columns, TERM="xterm-256color"))[0] for columns in (120, 60))
    assert "loss 2.25  accuracy 0.5  top5 0.75  1,234 examples/s  loss scale 32768  ETA 24:10:00" in wide
    assert narrow.rstrip() == "step 13000/100000  loss 2.25  1,234 examples/s  ETA 24:10:00"


def test_a_plan_fits_a_narrow_terminal_and_commands_stay_whole_to_be_copied() -> None:
    screen = [line.rstrip() for line in screen_of(on_a_terminal(columns=60, TERM="xterm-256color"))]
    (command,) = [line for line in screen if "--mode=export" in line]
    assert command.startswith("  python -m") and command.endswith("--end")
    assert max(len(line) for line in screen if line != command) <= 60


def test_no_color_means_no_color() -> None:
    colors = r"\x1b\[(?:\d+;)*(?:3[0-7]|38;5;\d+|9[0-7])(?:;\d+)*m"
    assert re.search(colors, on_a_terminal(TERM="xterm-256color"))
    assert not re.search(colors, on_a_terminal(TERM="xterm-256color", NO_COLOR="1"))


WAITING = """
import sys, threading
from launcher.reporting import console as module
module._TICK_SECONDS = module._PATIENCE_SECONDS = 0.01
class Seen:  # the stream, and that something was written to it
    def __init__(self): self.count, self.changed = 0, threading.Condition()
    def __getattr__(self, name): return getattr(sys.__stdout__, name)
    def write(self, text):
        with self.changed:
            self.count += text.count("compiling")
            self.changed.notify_all()
        return sys.__stdout__.write(text)
seen = Seen()
console = module.make_console(total_steps=4, stream=seen)
with console.waiting("compiling the training step"), seen.changed:
    assert seen.changed.wait_for(lambda: seen.count >= (3 if sys.__stdout__.isatty() else 1), timeout=60)
print("compiled", flush=True)
"""


def test_a_terminal_counts_the_seconds_of_a_wait_and_leaves_nothing_of_it() -> None:
    written = on_a_terminal(WAITING, TERM="xterm-256color")
    assert written.count("compiling the training step 0:0") >= 3
    assert [line for line in screen_of(written) if line.strip()] == ["compiled"]


def test_a_pipe_is_told_of_a_long_wait_at_its_start_and_its_end() -> None:
    lines = subprocess.check_output([sys.executable, "-c", WAITING], env=environment(), text=True).splitlines()
    assert lines[0] == "compiling the training step …"
    assert re.fullmatch(r"compiling the training step: took 0:\d\d", lines[1])
    assert lines[2:] == ["compiled"]


def test_a_pipe_is_told_of_a_wait_again_and_again() -> None:
    again = WAITING.replace("seen = Seen()", "module._AGAIN_SECONDS = 0.0\nseen = Seen()").replace("else 1)", "else 3)")
    lines = subprocess.check_output([sys.executable, "-c", again], env=environment(), text=True).splitlines()
    assert len([line for line in lines if re.fullmatch(r"compiling the training step … 0:\d\d", line)]) >= 3


def test_a_pipe_is_told_nothing_of_a_short_wait() -> None:
    stream = io.StringIO()
    with make_console(total_steps=1, stream=stream).waiting("compiling"):
        pass
    assert stream.getvalue() == ""


def screen_of(written: str) -> list[str]:
    """The lines that stay on a terminal that knows CR, LF, cursor up and erase line."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[\d+A", part):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return lines


def test_a_dumb_terminal_gets_plain_lines() -> None:
    written = on_a_terminal(TERM="dumb")
    assert "\x1b" not in written
    assert "step 400/400" in written


def test_a_pipe_that_nobody_reads_any_more_does_not_stop_the_training() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", PROGRAM, "gone"]
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        os.close(writing)
        errors = process.communicate()[1]
    assert (process.returncode, errors) == (0, "done\n")


def test_a_terminal_that_was_closed_does_not_stop_the_training() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "gone"]
    env = environment(TERM="xterm-256color")
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=env, text=True) as process:
        os.close(theirs)
        os.close(ours)
        errors = process.communicate()[1]
    assert (process.returncode, errors) == (0, "done\n")


def test_a_character_that_the_output_lacks_is_replaced() -> None:
    raw = io.BytesIO()
    console = make_console(total_steps=1, stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.note("scale 2 → 1")
    assert raw.getvalue() == b"scale 2 ? 1\n"


def test_the_loss_scale_is_shown_only_when_there_is_one() -> None:
    stream = io.StringIO()
    console = make_console(total_steps=10, stream=stream)
    console.train({"step": 1, "loss": 1.0, "loss_scale": 1.0})
    console.train({"step": 2, "loss": 1.0})
    assert stream.getvalue() == "step 1/10  loss 1\nstep 2/10  loss 1  ETA 0:00\n"


def test_the_time_to_go_is_that_of_the_steps_since_the_first_event() -> None:
    stream = io.StringIO()
    readings = seconds(1000.0, 1010.0, 1700.0, 1800.0)
    console = make_console(total_steps=1000, stream=stream, clock=lambda: next(readings))
    for step in (500, 510, 600, 1000):
        console.train({"step": step})
    lines = stream.getvalue().splitlines()
    # 10 s for 10 steps, 490 to go; 700 s for 100 steps, 400 to go.
    assert lines == [
        "step 500/1000",
        "step 510/1000  ETA 8:10",
        "step 600/1000  ETA 46:40",
        "step 1000/1000",
    ]


def test_long_times_have_hours() -> None:
    stream = io.StringIO()
    readings = seconds(0.0, 3600.0)
    console = make_console(total_steps=30, stream=stream, clock=lambda: next(readings))
    for step in (10, 20):
        console.train({"step": step})
    assert stream.getvalue().splitlines()[1] == "step 20/30  ETA 1:00:00"
