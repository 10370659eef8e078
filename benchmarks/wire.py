"""Steps a second of workers with a slow network between them, by wire dtype. Needs root, ip and tc (Linux).

    sudo python benchmarks/wire.py                                       # two workers, 1 Gbit/s, three dtypes
    sudo python benchmarks/wire.py --workers=4 --gbits=10
    sudo python benchmarks/wire.py --bucket_mib=4 --bucket_mib=64 --wire_dtype=float32 --examples=256

Each worker has a network namespace of its own, joined by a bridge; what it sends is held to that rate. The model is an
MLP of 20 million weights on scikit-learn's digits, and takes hardly any arithmetic with few examples. Runs take turns;
the ratio is to the first of a round. `hidden` is the share of the shorter of arithmetic and sending that the longer
one covers: 0 when they follow each other, 1 when the step takes as long as the longer. Arithmetic is the time of the
same step over a network that is not held back, sending what the ring must send at that rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measuring import spread

_SWITCH = "lw-switch"
_UNHELD = 0.0
_MODEL = [
    "image_data.name = 'digits'",
    "mlp.units = 1024",
    "mlp.layers = 20",
    "train.steps_per_loop = 1",
    "train.evaluate_every = 0",
    "train.checkpoint_every = 1000000",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gbits", type=float, default=1.0, help="that each worker can send a second")
    parser.add_argument("--wire_dtype", action="append", help="may repeat; default float32, bfloat16, float16")
    parser.add_argument("--bucket_mib", action="append", type=int, help="may repeat; default what the recipe takes")
    parser.add_argument("--examples", type=int, default=2, help="of each worker in a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log_steps", type=int, default=5, help="steps that one figure is the mean of")
    options = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("network namespaces need root and the programs ip and tc (Debian: iproute2)")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(json.dumps(compare(options), indent=2))


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Seconds of a step, bytes that it sends, and ratios, of each combination of dtype and bucket."""
    dtypes = options.wire_dtype or ["float32", "bfloat16", "float16"]
    cases = list(itertools.product(dtypes, options.bucket_mib or [None]))
    seconds: dict[tuple[str, int | None], list[float]] = {case: [] for case in cases}
    sent: dict[tuple[str, int | None], int] = {}
    unheld = {}
    with network(options.workers, _UNHELD):
        for case in cases:
            unheld[case], _ = step_seconds(options, *case)
    with network(options.workers, options.gbits):
        for number in range(options.rounds):
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                taken, sent[case] = step_seconds(options, *case)
                seconds[case].append(taken)
                print(f"round {number + 1}/{options.rounds}: {case}: {taken:.3f} s a step", file=sys.stderr, flush=True)
    rows = []
    for case in cases:
        ratios = [first / own for first, own in zip(seconds[cases[0]], seconds[case], strict=True)]
        sending, median = sent[case] * 8 / (options.gbits * 1e9), statistics.median(seconds[case])
        rows.append(
            {
                "wire_dtype": case[0],
                "bucket_mib": case[1],
                "seconds": spread(seconds[case]),
                "seconds_unheld": round(unheld[case], 4),
                "sent_mb": round(sent[case] / 1e6, 1),
                "sending_seconds": round(sending, 4),
                "hidden": round((unheld[case] + sending - median) / min(unheld[case], sending), 2),
                "rate_ratio": spread(ratios),
            }
        )
    return {"workers": options.workers, "gbits": options.gbits, "examples": options.examples, "runs": rows}


def step_seconds(options: argparse.Namespace, wire_dtype: str, bucket_mib: int | None) -> tuple[float, int]:
    """Median seconds of a step, and the bytes that worker 0 sends in one."""
    steps = 5 * options.log_steps
    bindings = [
        *_MODEL,
        f"train.global_batch_size = {options.examples * options.workers}",
        f"train.steps = {steps}",
        f"train.log_every = {options.log_steps}",
        f"train.wire_dtype = '{wire_dtype}'",
        f"train.bucket_bytes = {bucket_mib * 2**20 if bucket_mib else None}",
    ]
    command = [sys.executable, "-m", "launcher.main", "--gin_file=mlp_fashion.gin", "--mode=train"]
    command += [f"--gin_param={binding}" for binding in bindings]
    peers = [f"{_address(index)}:5000" for index in range(options.workers)]
    before = _bytes_sent()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for index in range(options.workers):
            config = {"cluster": {"worker": peers}, "task": {"type": "worker", "index": index}}
            log = stack.enter_context(open(Path(folder, f"{index}.log"), "w"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", _worker(index), *command, f"--model_dir={folder}/run"],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stdout=log,
                stderr=log,
            )
            stack.callback(process.kill)
            processes.append(process)
        if any(process.wait() for process in processes):
            raise SystemExit(Path(folder, "0.log").read_text())
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "train"][1:]
    taken = [options.examples * options.workers / row["examples_per_second"] for row in rows]
    return statistics.median(taken), (_bytes_sent() - before) // steps


@contextlib.contextmanager
def network(workers: int, gbits: float) -> Iterator[None]:
    """Namespaces joined by a bridge, each sending `gbits` a second at most; `_UNHELD` for no limit."""
    with contextlib.ExitStack() as stack:
        for name in (_SWITCH, *map(_worker, range(workers))):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        in_switch = ("ip", "-n", _SWITCH, "link")
        _run(*in_switch, "add", "bridge", "type", "bridge")
        _run(*in_switch, "set", "bridge", "up")
        for index in range(workers):
            own, port = _worker(index), f"port{index}"
            _run("ip", "-n", own, "link", "add", "wire", "type", "veth", "peer", "name", port, "netns", _SWITCH)
            _run(*in_switch, "set", port, "master", "bridge", "up")
            _run("ip", "-n", own, "addr", "add", f"{_address(index)}/24", "dev", "wire")
            _run("ip", "-n", own, "link", "set", "wire", "up")
            _run("ip", "-n", own, "link", "set", "lo", "up")
            if gbits != _UNHELD:
                held = ("tbf", "rate", f"{gbits}gbit", "burst", f"{max(1, round(gbits))}mb", "latency", "100ms")
                _run("tc", "-n", own, "qdisc", "add", "dev", "wire", "root", *held)
        yield


def _bytes_sent() -> int:
    shown = subprocess.run(
        ["ip", "-n", _worker(0), "-s", "-j", "link", "show", "wire"], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]


def _worker(index: int) -> str:
    return f"lw-worker{index}"


def _address(index: int) -> str:
    return f"10.99.99.{index + 1}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
