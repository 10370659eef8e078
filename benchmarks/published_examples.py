"""The examples and guides of keras.io, each trained by Keras and, with one line changed, by Launcher.

    git clone https://github.com/keras-team/keras-io
    python benchmarks/published_examples.py keras-io                       # all: about an hour on two cores
    python benchmarks/published_examples.py keras-io --only=mnist_convnet --replicas=1

An example is read from the folder and run, each time in a process of its own: as it is, and with `model.fit(…)`
replaced by `launcher.fit(model, …)` through `python -m launcher.main --gin_file=EXAMPLE`, on one replica and on two.
One JSON line an example, then a table in Markdown. Before each `fit` the model is evaluated, and after it a number is
drawn from NumPy's generator.

With `--again` it is also run by `python EXAMPLE`, twice in one folder: then with twice the learning rate, and
after each `fit` with one more, of which a callback raises an exception of its own. Keras's is that second time.

What is otherwise than published, for both alike: data is made up (`published_sets.py`), sizes are cut, models of 224
pixels begin untrained, pictures are left out, one `fit` trains at most two batches for two epochs, and of more than two
calls of `fit` the others return what the second one did. The noise is off: dropout keeps everything, random
augmentation changes nothing, numbers that a model draws in its graph are the same ones each time, and no data is
shuffled, as Launcher draws and shuffles by numbers of its own. Seeds are set anew after each `fit`.

Where it is not equal, Keras trains once more from first weights that are changed by 1e-7 of themselves: what it then
differs from itself by is how much of any difference is rounding. Where there is an Embedding, it trains again with
dense gradients of it, as Launcher's are: rows that occur twice in a batch are added up before they are squared.

With `--lint=mixed_bfloat16` nothing is trained: what `launcher.lint` says of the models, built under that policy.

With `--engine=pjrt` Launcher's are by its second engine.

With `--times=5` nothing is compared but seconds, wall and processor's, of all calls of `fit`, in so many rounds in
turns: Keras's, and Launcher's by `python EXAMPLE`. Imports are done before, and no model is evaluated first.

Equal means: what each `fit` tells of all epochs, and the number drawn after it, differ from Keras's by at most 1e-5,
relative above 1. What follows the last `fit` must end without an error where it does with Keras.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import published_sets as made_up
import published_stand_in
from measuring import spread

TOLERANCE = 1e-5
_SIZES = (  # names of constants, and what they are at most
    (re.compile(r"(.*_)?epochs?(_.*)?", re.I), 2),
    (re.compile(r"(.*_)?batch_?size|batch", re.I), 8),
    (re.compile(r"(num_)?val(idation)?_(samples|size)", re.I), 16),
    (re.compile(r"(num_)?(transformer_)?(layers|blocks|heads)|depth", re.I), 2),
)
_SHOWS = re.compile(r"^(plot|show|visuali[sz]e|display|vis_|make_gif|imshow|generate_and_|summary)")


class _Cut(ast.NodeTransformer):
    """Cuts sizes, and has each `fit` be called by `published_fit`."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings, self.fits = settings, 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in self._settings:
                node.value = ast.parse(repr(self._settings[name]), mode="eval").body
            elif isinstance(node.value, ast.Constant) and type(node.value.value) is int:
                most = next((size for pattern, size in _SIZES if pattern.fullmatch(name)), node.value.value)
                node.value = ast.Constant(min(most, node.value.value))
        return node

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        self.generic_visit(node)
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            number = bound.operand if isinstance(bound, ast.UnaryOp) else bound
            if isinstance(number, ast.Constant) and isinstance(number.value, int) and number.value >= 1000:
                number.value = 16
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "reshape" and len(node.args) > 1:
            sizes = [ast.Constant(-1) if getattr(one, "value", 0) in (60000, 10000) else one for one in node.args]
            node.args = sizes
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "fit"
            and not isinstance(node.func.value, ast.Call)
        ):
            self.fits += 1
            called = ast.Call(ast.Name("published_fit", ast.Load()), [node.func.value, *node.args], node.keywords)
            return ast.copy_location(called, node)
        return node


def rewritten(text: str, entry: made_up.Entry) -> str:
    """An example without what shows, and with its sizes cut."""
    tree = ast.parse(text)
    trains = {"published_fit"}
    cut = _Cut(entry.settings)
    tree = ast.fix_missing_locations(cut.visit(tree))
    if not cut.fits:
        raise ValueError("no call of fit")

    def names(node: ast.AST) -> set[str]:
        found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}

    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for _ in defined:
        trains |= {node.name for node in defined if isinstance(node, ast.FunctionDef) and names(node) & trains}
    own = [not isinstance(node, ast.FunctionDef | ast.ClassDef) and bool(names(node) & trains) for node in tree.body]
    if not any(own):
        raise ValueError("no call of fit outside of functions")
    body = [
        node
        for node, does in zip(tree.body, own, strict=True)
        if does or isinstance(node, ast.FunctionDef | ast.ClassDef) or not _is_left_out(node, names(node), entry)
    ]
    return ast.unparse(ast.Module(body, []))


def _is_left_out(node: ast.stmt, names: set[str], entry: made_up.Entry) -> bool:
    if names & set(entry.drop) or (isinstance(node, ast.Assign) and "KERAS_BACKEND" in ast.unparse(node)):
        return True
    shows = bool(names & {"plt", "pyplot"}) or any(_SHOWS.match(name) for name in names)
    return shows and isinstance(node, ast.Expr | ast.For | ast.With | ast.If)


def run_one(program: Path, name: str, replicas: int, workers: int, result: Path) -> None:
    """In a process of its own: trains, and writes what came of it; 0 replicas are Keras's own `fit`."""
    command = [f"--gin_file={program}", f"--model_dir={program.parent / 'run'}"]
    command += [f"--engine={engine}"] if (engine := os.environ.get("PUBLISHED_ENGINE")) else []
    if not replicas:
        sys.argv, sys.path[:0] = [str(program)], [str(program.parent)]
        runpy.run_path(str(program), run_name="__main__")
        return
    if workers > 1:
        sys.argv, module = ["launch", f"--workers={workers}", *command], "launcher.launch"
    else:
        sys.argv, module = ["main", *command, *([f"--replicas={replicas}"] if replicas > 1 else [])], "launcher.main"
    runpy.run_module(module, run_name="__main__")


def in_fork(
    program: Path, name: str, replicas: int, workers: int, seconds: float, enough: int, by: str
) -> dict[str, Any]:
    """What each fit told, by Keras's or Launcher's; or an error, unless so many were done: then `rest`, what it was."""
    folder = program.parent
    result, log = folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            os.chdir(folder)
            stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            os.environ |= {"PUBLISHED_NAME": name, "PUBLISHED_BY": by}
            os.environ |= {"PUBLISHED_RESULT": str(result)}
            run_one(program, name, replicas, workers, result)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if not isinstance(end.code, int | None):
                print(end.code)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline, late = time.monotonic() + seconds, ""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if not late and time.monotonic() > deadline:
            late = f"not within {seconds:.0f} s"
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.1)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    fits = json.loads(result.read_text()) if result.exists() else []
    if late:
        return {"fits": fits, "rest": late} if fits and len(fits) == enough else {"error": late, "fits": fits}
    # What fails between two calls of fit, such as for want of a network, ends Keras's training as it does Launcher's.
    told = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception|Exit)\b)", line)]
    if not fits or (os.waitstatus_to_exitcode(status) and len(fits) != enough):
        return {"error": (told or lines or ["nothing was trained"])[-1][:300], "fits": fits}
    return {"fits": fits, "rest": (told or lines)[-1][:300] if os.waitstatus_to_exitcode(status) else ""}


Fits = Sequence[Mapping[str, Sequence[float]]]
"""What each fit told, epoch by epoch."""


def difference(fits: Fits, of_keras: Fits) -> tuple[float, str]:
    """The largest, relative above 1, and the name of what differs; infinity where one tells what the other does not."""
    if len(fits) != len(of_keras):
        return math.inf, f"{len(fits)} calls of fit for {len(of_keras)}"
    apart = {"": 0.0}
    for one, other in zip(fits, of_keras, strict=True):
        for name in one.keys() | other.keys():
            a, b = (np.array(told.get(name, [])) for told in (one, other))
            is_known = a.shape == b.shape and np.array_equal(np.isfinite(a), np.isfinite(b))
            largest = np.max(np.nan_to_num(abs(a - b) / np.maximum(1.0, abs(b))), initial=0.0) if is_known else math.inf
            apart[name] = max(apart.get(name, 0.0), float(largest))
    name = max(apart, key=lambda one: apart[one])
    return apart[name], name


def tried(
    folder: Path,
    name: str,
    replicas: Sequence[int],
    num_workers: int,
    seconds: float,
    kept: Path | None,
    again: bool = False,
) -> dict:
    """What becomes of one example."""
    entry = made_up.ENTRIES.get(Path(name).stem, made_up.Entry())
    found: dict[str, Any] = {"example": name}
    if entry.left_out:
        return found | {"left_out": entry.left_out}
    text = (folder / name).read_text(encoding="utf-8")
    missing = [one for one in sorted(_imports(text)) if one not in published_stand_in.STUBBED and not _is_there(one)]
    if missing:
        return found | {"left_out": f"needs {', '.join(missing)}"}
    try:
        program = rewritten(text, entry)
    except ValueError as error:
        return found | {"left_out": str(error)}
    of_keras: Fits = []

    def run(key: str, number: int, by: str, workers: int = 1, twice: bool = False) -> None:
        with tempfile.TemporaryDirectory(prefix="published_") as place:
            path = _written(place, name, program)
            one = in_fork(path, Path(name).stem, number, workers, seconds, len(of_keras), by)
            if twice:
                os.environ["PUBLISHED_AGAIN"] = "1"
                one = in_fork(path, Path(name).stem, number, workers, seconds, len(of_keras), by)
                del os.environ["PUBLISHED_AGAIN"]
            if kept is not None:
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(path.parent / "log", kept / f"{Path(name).stem}.{key}.log")
                shutil.copy(path, kept / path.name)
        if not of_keras and one.get("fits"):
            one["rest"] = one.pop("error", "") or one.get("rest", "")
        found[key] = one.get("fits")
        if "error" in one:
            found[f"{key}_error"] = one["error"]
            return
        found[f"{key}_rest"] = one.get("rest", "")
        if of_keras:
            found[f"{key}_difference"], found[f"{key}_differs"] = difference(one["fits"], of_keras)
        if found[f"{key}_rest"] and not found.get("keras_rest"):
            found[f"{key}_error"] = f"after fit: {found[f'{key}_rest']}"

    run("keras", 0, "keras")
    if "keras_error" in found:
        return found
    of_keras = found["keras"]
    for number in replicas:
        run(f"replicas_{number}", number, "launcher")
    if num_workers:
        run(f"workers_{num_workers}", 1, "launcher", num_workers)
    if again:
        of_keras = []
        run("keras_again", 0, "keras", twice=True)
        of_keras = found["keras_again"] or []
        run("again", 0, "launcher", twice=True)
        of_keras = found["keras"]
    apart = {key for key, value in found.items() if key.endswith("_difference") and value > TOLERANCE}
    if "replicas_1_difference" in apart and "Embedding" in text:
        run("dense", 0, "dense")
        found["dense_difference"], _ = difference(found["replicas_1"], found["dense"] or [])
    if apart and found.get("dense_difference", 1.0) > TOLERANCE:
        run("nudged", 0, "nudged")
    return found


def timed(folder: Path, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Seconds of the calls of `fit` by Keras and by Launcher, [rounds] each, and medians of their ratios."""
    entry = made_up.ENTRIES.get(Path(name).stem, made_up.Entry())
    program = rewritten((folder / name).read_text(encoding="utf-8"), entry)
    found: dict[str, Any] = {"example": name}
    taken: dict[str, list[Any]] = {"keras": [], "launcher": []}
    for number in range(rounds):
        for by in sorted(taken, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(prefix="published_") as place:
                path, times = _written(place, name, program), Path(place, "times")
                os.environ["PUBLISHED_TIMED"] = str(times)
                one = in_fork(path, Path(name).stem, 0, 1, seconds, 0, by)
                del os.environ["PUBLISHED_TIMED"]
                if "error" in one:
                    return found | {"error": f"{by}: {one['error']}"}
                taken[by].append(np.loadtxt(times, ndmin=2).sum(axis=0))
    keras, launcher = (np.array(taken[by]) for by in ("keras", "launcher"))
    for place, kind in enumerate(("wall", "processor")):
        found |= {
            f"{by}_{kind}": np.round(of[:, place], 2).tolist() for by, of in (("keras", keras), ("launcher", launcher))
        }
        found[f"ratio_{kind}"] = round(float(np.median(launcher[:, place] / keras[:, place])), 3)
    return found


def linted(folder: Path, name: str, policy: str, seconds: float) -> dict[str, Any]:
    """What `launcher.lint` says of the models that an example calls `fit` of, under a dtype policy."""
    entry = made_up.ENTRIES.get(Path(name).stem, made_up.Entry())
    try:
        program = rewritten((folder / name).read_text(encoding="utf-8"), entry)
    except ValueError as error:
        return {"example": name, "left_out": str(error)}
    with tempfile.TemporaryDirectory(prefix="published_") as place:
        set_policy = f"import keras; keras.config.set_dtype_policy({policy!r})\n"
        path, lines = _written(place, name, set_policy + program), Path(place, "lines")
        os.environ["PUBLISHED_LINT"] = str(lines)
        one = in_fork(path, Path(name).stem, 0, 1, seconds, 0, "keras")
        del os.environ["PUBLISHED_LINT"]
        if not lines.exists():
            return {"example": name, "left_out": one.get("error", "")}
        return {"example": name, "lines": [*dict.fromkeys(lines.read_text().splitlines())]}


def _written(place: str, name: str, program: str) -> Path:
    path = Path(place, "published", Path(name).name)
    path.parent.mkdir()
    setting = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
    setting += "import published_stand_in; published_fit = published_stand_in.stand_in()\n"
    path.write_text(setting + program)
    return path


def _imports(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Of what trains with Keras."""
    lines = [f"| example | Keras | {' | '.join(columns)} | |", f"|---|---|{'---|' * len(columns)}---|"]
    for row in rows:
        if "keras" not in row or f"{'keras'}_error" in row:
            continue
        entry = made_up.ENTRIES.get(Path(row["example"]).stem, made_up.Entry())
        told = row["keras"][-1]
        cells = [f"{told.get('loss', next(iter(told.values()), [math.nan]))[-1]:.5g}"]
        for key in columns:
            error, apart = row.get(f"{key}_error"), row.get(f"{key}_difference")
            cells.append("✗" if error else "" if apart is None else "=" if apart <= TOLERANCE else f"{apart:.1e}")
        nudged = row.get("nudged_difference", 0)
        reasons = ["rows of an embedding"] * (row.get("dense_difference", 1) <= max(TOLERANCE, 2 * nudged))
        reasons += [f"rounding: Keras itself {nudged:.1e}"] * (nudged > TOLERANCE)
        why = (
            entry.why
            or "; ".join(reasons)
            or next((row[f"{key}_error"] for key in columns if f"{key}_error" in row), "")
            or ", ".join(
                sorted({row[f"{key}_differs"] for key in columns if row.get(f"{key}_difference", 0) > TOLERANCE})
            )
        )
        why = why if {*cells[1:]} - {"=", ""} else ""
        lines.append(f"| {row['example'].removesuffix('.py')} | {' | '.join(cells)} | {why} |")
    return "\n".join(lines)


def summary(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """How many trained, and where they were equal."""
    trained = [row for row in rows if row.get("keras") and "keras_error" not in row]
    lines = [f"{len(rows)} examples, {len(trained)} of which train here with Keras"]
    for key in columns:
        taken = [row for row in trained if f"{key}_difference" in row]
        equal = sum(row[f"{key}_difference"] <= TOLERANCE for row in taken)
        lines.append(f"{key}: {len(taken)} taken, {equal} equal to Keras's one device within {TOLERANCE}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a clone of keras-io")
    parser.add_argument("--only", action="append", default=[], help="part of a path; may repeat")
    parser.add_argument("--replicas", default="1,2", help="beside Keras's own; empty for Keras alone")
    parser.add_argument("--workers", type=int, default=0, help="and on so many workers")
    parser.add_argument("--engine", help="that runs Launcher's steps, such as pjrt")
    parser.add_argument("--again", action="store_true", help="and twice in one folder, with another rate")
    parser.add_argument("--times", type=int, default=0, help="rounds in which only seconds are taken")
    parser.add_argument("--lint", default="", help="a dtype policy under which models are only looked at")
    parser.add_argument("--seconds", type=float, default=300.0, help="for one training")
    parser.add_argument(
        "--lines", type=Path, help="where JSON lines are added, and read: what is there is not run again"
    )
    parser.add_argument("--logs", type=Path, help="where programs and what they print are kept")
    options = parser.parse_args()
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "MPLBACKEND": "Agg", "KERAS_BACKEND": "tensorflow"}
    os.environ |= {"PUBLISHED_ENGINE": options.engine} if options.engine else {}
    replicas = [int(one) for one in options.replicas.split(",") if one]
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    for module in ("launcher.main", "launcher.modes.fit", "launcher.modes.train", "pandas", "matplotlib.pyplot"):
        importlib.import_module(module)
    parts = (options.folder / "examples", options.folder / "guides")
    paths = sorted(str(path.relative_to(options.folder)) for part in parts for path in part.rglob("*.py"))
    chosen = [
        path
        for path in paths
        if re.search(r"\.fit\(", (options.folder / path).read_text(encoding="utf-8"))
        and (not options.only or any(part in path for part in options.only))
    ]
    if options.lint:
        for name in chosen:
            print(json.dumps(linted(options.folder, name, options.lint, options.seconds)), flush=True)
        return
    if options.times:
        rows = []
        for name in chosen:
            rows.append(timed(options.folder, name, options.times, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
        for kind in ("wall", "processor"):
            print(f"{kind}: {spread([row[f'ratio_{kind}'] for row in rows if 'error' not in row])} of Keras's")
        return
    known: dict[str, dict] = {}
    if options.lines and options.lines.exists():
        known = {row["example"]: row for row in map(json.loads, options.lines.read_text().splitlines())}

    def row_of(name: str) -> dict:
        if name in known:
            return known[name]
        row = tried(options.folder, name, replicas, options.workers, options.seconds, options.logs, options.again)
        print(json.dumps(row), flush=True)
        if options.lines:
            with options.lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    rows = [row_of(name) for name in chosen]
    columns = [f"replicas_{number}" for number in replicas]
    columns += [f"workers_{options.workers}"] if options.workers else []
    columns += ["again"] if options.again else []
    versions = ", ".join(f"{one} {sys.modules[one].__version__}" for one in ("keras", "tensorflow"))
    print(f"\n{datetime.date.today()}, {versions}\n\n{table(rows, columns)}\n\n{summary(rows, columns)}")
    for row in rows:
        if why := row.get("left_out") or row.get("keras_error"):
            print(f"left out: {row['example']}: {why}")


if __name__ == "__main__":
    main()
