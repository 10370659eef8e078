"""All that is compared with what a user would pick instead, measured and written to benchmarks/RESULTS.md.

    python benchmarks/results.py                  # everything, most of it compiling; on a quiet machine
    python benchmarks/results.py --only=steps     # one part; the others stay as they are

Orbit, Flax and PyTorch are compared where they are: see peers.py, twins.py and starts.py. "wire" needs root.

A part's figures are kept in benchmarks/results.json, from which the page is written.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, FIGURES = HERE / "RESULTS.md", HERE / "results.json"
PARTS: dict[str, list[list[str]]] = {
    "steps": [
        ["peers.py", "--gin_file=mlp_fashion.gin", "--steps=500", "--gin_param=mlp.units = 64",
         "--gin_param=image_data.name = 'digits'"],
        ["peers.py", "--gin_file=resnet_cpu.gin", "--steps=40"],
        ["peers.py", "--gin_file=resnet_cpu.gin", "--steps=40", "--replicas=2"],
    ],
    "starts": [["starts.py", "--rounds=3"]],
    "input": [["photographs.py", "--images=1500", "--rounds=5"]],
    "waits": [["waits.py", "--gin_file=resnet_cpu.gin", "--gin_file=lstm_cpu.gin"]],
    "wire": [
        ["wire.py", "--workers=2", "--gbits=1", "--gbits=10", "--rounds=2"],
        ["wire.py", "--workers=3", "--gbits=1", "--rounds=1"],
        ["wire.py", "--workers=4", "--gbits=1", "--gbits=10", "--rounds=1"],
        ["wire.py", "--model=resnet", "--gbits=1", "--gbits=10", "--reduce_dtype=float32",
         "--bucket_mib=4", "--bucket_mib=16", "--bucket_mib=64", "--rounds=1"],
    ],
    "growth": [
        ["growth.py", "supervisor", "--sizes=8,64,256"],
        ["growth.py", "workers", "--sizes=1,2,4,8"],
        ["growth.py", "replicas", "--sizes=1,2,4,8"],
        ["growth.py", "examples", "--sizes=10000,100000,1000000,10000000,100000000"],
        ["growth.py", "state", "--sizes=100,400,1600,4000"],
        ["growth.py", "v5e_chips", "--sizes=4,16,64,256"],
        ["growth.py", "v5p_chips", "--sizes=4,16,64,256,1024"],
    ],
    "twins": [
        ["twins.py", model, f"--on={where}", "--layers=6", *guard]
        for where, guards in (("v5litepod-4", ([], ["--guarded"])), ("h100:4", ([],)), ("h200:4", ([],)))
        for guard in guards
        for model in ("resnet", "lm", "transformer")
    ],
}  # fmt: skip
# Of the libraries that are compared, and of what they stand on.
_VERSIONS = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "tf-models-official",
    "jax",
    "libtpu",
    "jax-cuda12-pjrt",
    "flax",
    "optax",
)
_TWIN_ROWS = {
    "matrix_tflop": "matrix TFLOP",
    "memory_gb": "memory traffic, GB",
    "cost_model_mcycles": "cost model, Mcycles",
    "peak_mib": "peak memory, MiB",
    "collective_mb": "reduced over replicas, MB",
    "copies": "copies",
    "compile_seconds": "compile, s",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="may repeat")
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for part in options.only or PARTS:
        runs = []
        for number, command in enumerate(PARTS[part], start=1):
            print(f"{part} {number}/{len(PARTS[part])}: {' '.join(command)}", file=sys.stderr, flush=True)
            runs.append({"command": _shown(command), **measured(command)})
        today = {"date": datetime.date.today().isoformat(), "processor": processor(), "versions": versions()}
        # Ratios differ with the kind of processor: what another one gave stays beside it.
        before = figures.get(part, {})
        elsewhere = before.pop("elsewhere", None)
        other = before if before and before.get("processor") != today["processor"] else elsewhere
        figures[part] = {**today, "runs": runs, "elsewhere": other}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page(figures))


def measured(command: list[str]) -> dict[str, Any]:
    """What one benchmark prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]], stdout=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{_shown(command)}: exit code {done.returncode}")
    return json.loads(done.stdout)


def processor() -> str:
    """Its name and number of cores that may be used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), 'unknown')}, {len(os.sched_getaffinity(0))} cores"


def versions() -> str:
    """Of what is installed, in a line."""
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def page(figures: Mapping[str, Any]) -> str:
    """The page, of the parts that were measured."""
    writers = {
        "steps": _steps,
        "starts": _starts,
        "input": _input,
        "waits": _waits,
        "wire": _wire,
        "growth": _growth,
        "twins": _twins,
    }
    parts = [
        writers[name](one)
        for name in PARTS
        if name in figures
        for one in (figures[name], figures[name].get("elsewhere"))
        if one
    ]
    card = [_card(figures["card"])] if "card" in figures else []
    return "\n\n".join([_HEAD, *parts, *card]) + "\n"


_HEAD = """# Launcher beside what a user would pick instead

Written by `python benchmarks/results.py`; the figures are in `results.json`. Each part names its commands, its day and
the versions. Where Launcher loses, the ratio says so."""


def _card(part: Mapping[str, Any]) -> str:
    """What scripts/gpu_check.sh and its peers found where there was a card; put into results.json by hand."""
    lines = ["## On a card", "", f"{part['date']}, {part['gpu']}; {part['versions']}.", ""]
    lines += ["| | ms a step | peak, GiB | forecast, GiB |", "|---|---|---|---|"]
    for run in part["runs"]:
        numbers = (run.get("ms") or "not timed", run["peak_gib"], run.get("forecast_gib", "-"))
        lines.append(f"| {run['what']} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*lines, "", *part["notes"]])


def _steps(part: Mapping[str, Any]) -> str:
    lines = [
        _title("Time of a step, in turns in one process on this machine's CPU", part),
        "The other's time divided by Launcher's in the same round, median and range: above 1, Launcher is faster.\n"
        "The batch stays in memory. CPU ratios are of processor seconds, which others disturb less.",
    ]
    for run in part["runs"]:
        lines += [
            f"\n    python benchmarks/{run['command']}\n",
            "| | ms a step | ratio | CPU ratio |",
            "|---|---|---|---|",
        ]
        names = [name for name, of in run.items() if isinstance(of, dict)]
        lines += [
            f"| {name} | {_number(run[name]['milliseconds']['median'])} | {_range(run[name]['ratio'])} | "
            f"{_range(run[name]['cpu_ratio'])} |"
            for name in names
        ]
    return "\n".join(lines)


def _starts(part: Mapping[str, Any]) -> str:
    (run,) = part["runs"]
    lines = [
        _title("Until a run trains, and trains again", part),
        "Seconds from the start of the process, and from kill -9 of one of two workers to the next step; and\n"
        "the other's divided by Launcher's in the same round: above 1, Launcher is faster; never is: not within 40 s.",
        f"\n    python benchmarks/{run['command']}\n",
        "| | until | seconds | ratio |",
        "|---|---|---|---|",
    ]
    for kind in ("imports", "run", "job"):
        lines += [
            f"| {kind}: {name} | {what} | {_range(figures['seconds'])} | {_range(figures['ratio'])} |"
            for name, of in run[kind].items()
            for what, figures in of.items()
        ]
    return "\n".join(lines)


def _input(part: Mapping[str, Any]) -> str:
    (run,) = part["runs"]
    lines = [
        _title("Photographs a second beside plain tf.data", part),
        "After the first batch. Plain tf.data's time divided by Launcher's in the same round: above 1, Launcher is\n"
        "faster. Beside it, median seconds until the first batch and until the iterator is gone, of Launcher / of\n"
        "plain tf.data.",
        f"\n    python benchmarks/{run['command']}\n",
        "| from | images a second | ratio | CPU ratio | first batch, s | end, s |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("files", "records"):
        once = [
            f"{_number(run[name][f'{what}_seconds']['median'])} / "
            f"{_number(run[name][f'plain_{what}_seconds']['median'])}"
            for what in ("first", "end")
        ]
        lines.append(
            f"| {name} | {_range(run[name]['images_per_second'])} | {_range(run[name]['ratio'])} | "
            f"{_range(run[name]['cpu_ratio'])} | {' | '.join(once)} |"
        )
    return "\n".join(lines)


def _waits(part: Mapping[str, Any]) -> str:
    (run,) = part["runs"]
    lines = [
        _title("What holds up a step: input, and a checkpoint beside it", part),
        f"The share of a run's loop that waits for batches. A save by itself, until it is on the disk, as a share of\n"
        f"{run['steps']} steps: what it would cost if they waited for it. And the time of these steps with a save at\n"
        "their beginning divided by that of as many without: above 1 is what it costs beside them.",
        f"\n    python benchmarks/{run['command']}\n",
        "| | input wait | state, MB | ms a step | loop held by a save, ms | save by itself, ms | share | CPU share | "
        "ratio beside steps |",
        "|---" * 9 + "|",
    ]
    lines += [
        f"| {row['recipe']} | {row['input_wait']:.2%} | {row['state_mb']} | "
        f"{_number(row['milliseconds_a_step']['median'])} | {_number(row['held_milliseconds']['median'])} | "
        f"{_number(row['alone_milliseconds']['median'])} | "
        f"{row['share']['median']:.2%} | {row['cpu_share']['median']:.2%} | {_range(row['ratio'])} |"
        for row in run["rows"]
    ]
    return "\n".join(lines)


def _wire(part: Mapping[str, Any]) -> str:
    lines = [
        _title("Steps over a slow network", part),
        "All workers on one machine: with more of them, or at 10 Gbit/s, its processors are what is slow. The MLP has\n"
        "20 million weights and hardly any arithmetic, the ResNet-50 a whole backward pass. The step rate is divided\n"
        "by that of the first line of the same network in the same round: above 1, it is faster. From worker 0's\n"
        "trace (`--profile_steps`): how long collectives work in a step, which share of that lies beside operations\n"
        "of the backward pass, and how long this pass takes.",
    ]
    for run in part["runs"]:
        lines += [
            f"\n    python benchmarks/{run['command']}\n",
            f"| {run['workers']} workers, {run['model']} | bucket, MiB | seconds a step | sent by each, MB | "
            "which takes, s | rate ratio | collectives, s | beside backward | backward, s |",
            "|---" * 9 + "|",
        ]
        lines += [
            f"| {row['gbits']:g} Gbit/s, {row['reduce_dtype']} | {row['bucket_mib'] or 'default'} | "
            f"{row['seconds']['median']:.3f} | {row['sent_mb']} | {row['sending_seconds']:.3f} | "
            f"{_range(row['rate_ratio'])} | {row['collective_seconds']['median']:.3f} | "
            f"{row['beside_backward']['median']:.0%} | {row['backward_seconds']['median']:.3f} |"
            for row in run["runs"]
        ]
    return "\n".join(lines)


def _growth(part: Mapping[str, Any]) -> str:
    lines = [
        _title("How cost grows", part),
        "With the exponent of the growth from the line before: 1 where cost grows as the size does, 0 where not.\n"
        "Replicas and workers share this machine's processors; a ring of n workers passes 2n(n-1) messages a step.\n"
        "A state is in MB, written to this machine's disk. Chips are those of a slice for which preflight compiles\n"
        "the step of a small ResNet, with nothing kept.",
    ]
    for run in part["runs"]:
        names = list(run["rows"][0]["figures"])
        lines += [f"\n    python benchmarks/{run['command']}\n", f"| {run['kind']} | {' | '.join(names)} |"]
        lines += ["|---" * (len(names) + 1) + "|"]
        before = None
        for row in run["rows"]:
            lines += [f"| {row['size']:,} | {' | '.join(_grown(name, row, before) for name in names)} |"]
            before = row
    return "\n".join(lines)


def _grown(name: str, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    value = row["figures"][name]
    shown = _number(value)
    if before is None:
        return shown
    exponent = math.log(value / before["figures"][name]) / math.log(row["size"] / before["size"])
    return f"{shown} ({exponent:.2f})"


def _twins(part: Mapping[str, Any]) -> str:
    lines = [
        _title("The compiled step beside the same work in Flax", part),
        "By the same compiler, without a TPU or GPU, four replicas, 64 images or 16 rows of text on each. Launcher /\n"
        "Flax and their ratio: below 1, Launcher's is less. All but the seconds that the compiler took, once, is the\n"
        "same in every run. Launcher's step takes the norm of the whole gradient, too, and applies no gradient that\n"
        "is not finite. Of the twins, the language model's alone takes the norm, and those called guarded alone apply\n"
        "no such gradient, by `optax.apply_if_finite`.",
    ]
    for where in dict.fromkeys(run["on"] for run in part["runs"]):
        runs = [run for run in part["runs"] if run["on"] == where]
        lines += ["", *(f"    python benchmarks/{run['command']}" for run in runs), ""]
        twins = [run["model"] + ", guarded" * run["guarded"] for run in runs]
        lines += [f"| {where} | {' | '.join(twins)} |", "|---" * (len(runs) + 1) + "|"]
        lines += [
            f"| {words} | {' | '.join(_pair(run, name) for run in runs)} |"
            for name, words in _TWIN_ROWS.items()
            if any(run["launcher"][name] for run in runs)
        ]
    return "\n".join(lines)


def _pair(run: Mapping[str, Any], name: str) -> str:
    ratio = run["ratios"].get(name)
    return f"{run['launcher'][name]} / {run['flax'][name]}" + (f": **{ratio}**" if ratio is not None else "")


def _range(spread: Mapping[str, float]) -> str:
    median, least, most = (_number(spread[key]).replace("inf", "never") for key in ("median", "least", "most"))
    return f"**{median}** ({least} to {most})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _title(words: str, part: Mapping[str, Any]) -> str:
    where = f"{part['processor']}, " if "processor" in part else ""
    return f"## {words}{'' if 'elsewhere' in part else ', elsewhere'}\n\n{part['date']}, {where}{part['versions']}.\n"


def _shown(command: list[str]) -> str:
    return " ".join(f'"{word}"' if " " in word else word for word in command)


if __name__ == "__main__":
    main()
