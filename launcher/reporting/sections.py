"""The sections of a run's page: each a function of the folder that returns None where there is nothing to say."""

import datetime
import html
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.reporting import attempts as attempts_file
from launcher.reporting import page
from launcher.reporting.curves import of_run, skipped_steps, title
from launcher.reporting.page import Section
from launcher.reporting.run_folder import RUNNING, UNFINISHED, RunFolder
from launcher.reporting.sinks import PICTURE
from launcher.reporting.units import milliseconds

_LONG_ERROR = 12  # lines
_DONE = {"note": "noted", "skip": "step skipped", "stop": "run ended", "rewind": "run ended"}
_PARTS = {"input_wait": "waiting for input", "startup": "start-up", "lost": "lost to repeated steps"}


def header(folder: RunFolder) -> str:
    """Name, how it ended, the numbers that matter, the command."""
    summary, record = folder.summary, folder.record
    step = summary.get("step", folder.events[-1]["step"] if folder.events else None)
    total = f" of {record.total_steps:,}" if record and record.total_steps else ""
    where = f"at step {page.show(step)}{total}" if step is not None else ""
    parts = [f"<h1>{html.escape(folder.name)}</h1>"]
    if folder.is_run:
        status = html.escape(folder.status)
        parts.append(f'<p><span class="status {status}">{status}</span>{where}{_note(folder)}</p>')
    parts.append(_error(folder))
    if tiles := _tiles(folder):
        parts.append(f'<div class="tiles">{"".join(tiles)}</div>')
    rows = {"Began": _date(folder.began)} if folder.began else {}
    if record is not None:
        rows |= {"Recipe": ", ".join(record.recipe)} if record.recipe else {}
        rows |= {"Devices": record.plan["strategy"]} if "strategy" in record.plan else {}
    elif summary.get("strategy"):
        number = summary.get("num_replicas")
        rows["Devices"] = f"{summary['strategy']}, {page.show(number)} replica{'s' if number != 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    rows |= {"Versions": versions} if versions else {}
    parts.append(page.facts(rows))
    if record is not None and record.command:
        parts.append(f"<pre>{html.escape(record.command)}</pre>")
    return "\n".join(filter(None, parts))


def curves(folder: RunFolder) -> Section | None:
    """Charts of all that was measured and moved."""
    charts = of_run(folder)
    if not charts.panels["curves"]:
        return Section("Curves", page.paragraph("Nothing was measured.")) if folder.is_run else None
    notes = []
    if charts.constant:
        told = ", ".join(f"{name.replace('_', ' ')} {page.show(value)}" for name, value in charts.constant.items())
        notes.append(f"Constant: {told}.")
    if skipped := skipped_steps(folder):
        notes.append(f"Steps skipped because gradients were not finite, or above a limit: {skipped:g}.")
    body = page.chart_tools(charts) + page.panels("curves")
    return Section("Curves", body + page.paragraph(" ".join(notes)), charts)


def spikes(folder: RunFolder) -> Section | None:
    """Spikes of loss and gradient norm, and what was done about each."""
    events = folder.of_split("spike")
    if not events:
        return None
    rows = []
    for event in events:
        done = _DONE.get(str(event.get("action")), "")
        if left_out := event.get("left_out"):
            first, last = left_out
            done = f"gone back to step {event['step']:,}, batches {first:,} to {last:,} left out"
        rows.append([page.show(event.get("spike_step", event["step"])), str(event.get("what", "")), done])
    return Section("Spikes", _first_ten(["Step", "What", "Done"], rows, "more"))


def evaluations(folder: RunFolder) -> Section | None:
    """Every evaluation, the newest first."""
    events, best = folder.of_split("eval"), folder.best
    if not events:
        return None
    names = [name for name in events[-1] if name not in ("split", "time", "non_finite")]
    rows = [
        [*(event.get(name) for name in names), "best" if event is best and len(events) > 1 else ""]
        for event in reversed(events)
    ]
    return Section("Evaluations", _first_ten([*(title(name) for name in names), ""], rows, "earlier ones"))


def samples(folder: RunFolder) -> Section | None:
    """Answers of the model to some examples of the newest evaluation."""
    found = folder.samples
    rows = [row for row in found.get("rows", []) if len(row) == 3]
    if not rows:
        return None
    said = page.paragraph(f"At step {page.show(found.get('step'))}, on examples that it was not trained on.")
    if rows[0][0].startswith(PICTURE):
        return Section("Samples", f'{said}<div class="pictures">{"".join(map(_figure, rows))}</div>')
    told = [[given, made, "the same" if made == wanted else wanted] for given, made, wanted in rows]
    return Section("Samples", said + page.grid([["Given", "The model wrote", "Expected"], *told]))


def attempts(folder: RunFolder) -> Section | None:
    """Every start, what ended it and what that cost; nothing for a run that was started once."""
    if len(folder.attempts) < 2:
        return None
    rows = [["Attempt", "Began", "Lasted", "Steps", "Ended by", "Steps repeated", "Down"]]
    for one, after in itertools.zip_longest(folder.attempts, folder.attempts[1:]):
        lasted = page.duration(one["ended"] - one["started"])
        steps = f"from {one['from_step']:,} to {one['to_step']:,}"
        repeated = page.show(max(0, one["to_step"] - after["from_step"])) if after else ""
        down = page.duration(max(0.0, after["started"] - one["ended"])) if after else ""
        rows.append([str(one["number"]), _date(one["started"]), lasted, steps, one["ended_by"], repeated, down])
    return Section("Attempts", page.grid(rows))


def where_the_time_went(folder: RunFolder) -> Section | None:
    """Seconds over all attempts where they are known, else of the last process."""
    goodput = folder.summary.get("goodput")
    seconds = goodput if isinstance(goodput, Mapping) else folder.summary.get("seconds") or {}
    parts = {
        _PARTS.get(name, name.replace("_", " ")): value
        for name, value in seconds.items()
        if name != "total" and _is_number(value)
    }
    share = folder.summary.get("goodput_share")
    whole = attempts_file.wall_seconds(folder.summary) if share else seconds.get("total")
    if _is_number(whole) and whole > sum(parts.values()):
        parts["other"] = whole - sum(parts.values())
    if not any(parts.values()):
        return None
    words = {name: page.duration(value) for name, value in parts.items()}
    text = f"Goodput: {share:.1%} of the wall time went into steps that count." if _is_number(share) else ""
    if not isinstance(goodput, Mapping) and len(folder.attempts) > 1:
        text = "Of the last attempt only."
    return Section("Where the time went", page.bar(parts, words) + page.paragraph(text))


def workers(folder: RunFolder) -> Section | None:
    """Differences of the workers, as the summary has them: a mapping of numbers for each worker."""
    told = folder.summary.get("workers")
    rows = told if isinstance(told, list) else []
    rows = [row for row in rows if isinstance(row, Mapping)]
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(name, row.get(name)) for name in names] for row in rows]
    body = page.grid([[title(name.replace("_seconds", " time a step")) for name in names], *cells])
    slow = folder.summary.get("slow_worker")
    return Section("Workers", body + page.paragraph("" if slow is None else f"Worker {slow} is a straggler."))


def kernels(folder: RunFolder) -> Section | None:
    """Kernels that took most of a GPU in the traced steps."""
    rows = [[name, page.show(times), f"{taken:.3f}"] for name, times, taken in folder.summary.get("kernels", ())]
    return Section("Kernels", page.grid([["Kernel", "Times", "ms a step"], *rows])) if rows else None


def changes(folder: RunFolder) -> Section | None:
    """Bindings of the recipe that the command line changed."""
    if folder.record is None or not folder.record.changes:
        return None
    rows = [[one.name, one.recipe or "not bound", one.run] for one in folder.record.changes]
    return Section("Changed from the recipe", page.grid([["Binding", "Recipe", "This run"], *rows]))


def plan(folder: RunFolder) -> Section | None:
    """Lines of the plan, and all bindings that the run used."""
    described = page.facts(folder.record.plan) if folder.record else ""
    if folder.config:
        described += page.details(f"{len(folder.config)} bindings that the run used", page.facts(folder.config))
    return Section("Plan", described) if described else None


SECTIONS = (curves, spikes, evaluations, samples, attempts, where_the_time_went, kernels, workers, changes)


def _first_ten(heading: Sequence[str], rows: Sequence[Sequence[Any]], others: str) -> str:
    shown = page.grid([heading, *rows[:10]])
    rest = page.grid([heading, *rows[10:]])
    return shown + page.details(f"{len(rows) - 10} {others}", rest) if len(rows) > 10 else shown


def _figure(row: Sequence[str]) -> str:
    picture, made, wanted = (html.escape(cell) for cell in row)
    told = made if made == wanted else f'<b class="bad">{made}</b>, is {wanted}'
    return f'<figure><img src="{picture}" alt="{wanted}"><figcaption>{told}</figcaption></figure>'


def _tiles(folder: RunFolder) -> list[str]:
    tiles = []
    name, best = folder.best_metric, folder.best
    if name and best:
        only = len(folder.of_split("eval")) == 1
        which = "evaluation" if only else "best evaluation"
        tiles.append(page.tile(page.show(best[name]), f"{name.replace('_', ' ')}, {which}, step {best['step']:,}"))
    train = folder.of_split("train")
    if train and train[-1].get("loss") is not None:
        tiles.append(page.tile(page.show(train[-1]["loss"]), f"training loss, step {train[-1]['step']:,}"))
    if folder.seconds is not None:
        tiles.append(page.tile(page.duration(folder.seconds), "wall time"))
    speed = [event["examples_per_second"] for event in train if _is_number(event.get("examples_per_second"))]
    if speed:
        tiles.append(page.tile(f"{sorted(speed)[len(speed) // 2]:,.0f}", "examples a second, median"))
    if len(folder.attempts) > 1:
        tiles.append(page.tile(str(len(folder.attempts)), "attempts"))
    share = folder.summary.get("goodput_share")
    if _is_number(share):
        tiles.append(page.tile(f"{share:.1%}", "goodput"))
    if skipped := skipped_steps(folder):
        tiles.append(page.tile(f"{skipped:g}", "steps skipped"))
    return tiles


def _note(folder: RunFolder) -> str:
    if folder.status == RUNNING:
        return ' <span class="muted">written while it trains; load again for more</span>'
    if why := folder.summary.get("ended_early"):
        return f' <span class="muted">{html.escape(why)}</span>'
    if folder.status == UNFINISHED:
        last = f": the last event is of {_date(folder.events[-1].get('time'))}" if folder.events else ""
        return f' <span class="muted">it runs, or was killed{last}</span>'
    return ""


def _error(folder: RunFolder) -> str:
    error = folder.summary.get("error")
    if not error:
        return ""
    lines = str(error).splitlines()
    shown = f'<pre class="wrong">{html.escape(chr(10).join(lines[:_LONG_ERROR]))}</pre>'
    if len(lines) > _LONG_ERROR:
        rest = f"<pre>{html.escape(chr(10).join(lines[_LONG_ERROR:]))}</pre>"
        shown += page.details(f"{len(lines) - _LONG_ERROR} more lines", rest)
    return shown


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_seconds") and _is_number(value):
        return milliseconds(value)
    return page.show(value) if _is_number(value) or value is None else str(value)
