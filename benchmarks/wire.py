"""Steps a second of workers with a slow network between them, by reduce dtype. Needs root, ip and tc (Linux).

    sudo python benchmarks/wire.py --workers=4 --gbits=1 --gbits=10
    sudo python benchmarks/wire.py --model=resnet --reduce_dtype=float32 --bucket_mib=4 --bucket_mib=64 --gbits=1

Each worker has a network namespace of its own, joined by a bridge; what it sends is held to that rate. The model "mlp"
has 20 million weights and takes hardly any arithmetic; "resnet" is a ResNet-50 on 8 images of 64 pixels a worker. Runs
take turns; the ratio is to the first one of a rate in its round.

Of three steps in the middle, worker 0 takes a trace (`--profile_steps`). `collective_seconds` are those of a step in
which it shows a collective at work, `beside_backward` is the share of them in which it shows an operation of the
backward pass as well, and `backward_seconds` are those from its first operation to its last.
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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from measuring import spread

_SWITCH = "lw-switch"
_COMMON = ["train.steps_per_loop = 1", "train.evaluate_every = 0", "train.checkpoint_every = 1000000"]
# The recipe, the examples of each worker in a step, and bindings.
_MODELS = {
    "mlp": ("mlp_fashion.gin", 2, ["image_data.name = 'digits'", "mlp.units = 1024", "mlp.layers = 20"]),
    "resnet": (
        "resnet_cpu.gin",
        8,
        [
            "resnet.depth = 50",
            "resnet.norm_group_size = 8",
            "image_data.name = 'synthetic'",
            "image_data.image_size = 64",
            "synthetic_images.num_classes = 1000",
            "image_data.augmentation = 'none'",
        ],
    ),
}
_WARM_UP, _TRACED = 2, 3

Interval = tuple[float, float]


class Case(NamedTuple):
    """One run: of a rate, a dtype and a size of bucket."""

    gbits: float
    reduce_dtype: str
    bucket_mib: int | None


class Found(NamedTuple):
    """What one run tells: seconds of a step outside the trace, bytes that worker 0 sends in one, and its trace."""

    seconds: float
    sent: float
    trace: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", choices=_MODELS, default="mlp")
    parser.add_argument("--gbits", action="append", type=float, help="that each worker can send a second; may repeat")
    parser.add_argument("--reduce_dtype", action="append", help="may repeat; default float32, bfloat16, float16")
    parser.add_argument("--bucket_mib", action="append", type=int, help="may repeat; default what the recipe takes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="after those that warm up, without those in the trace")
    options = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("network namespaces need root and the programs ip and tc (Debian: iproute2)")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(json.dumps(compare(options), indent=2))


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Seconds of a step, bytes that it sends, what the trace shows, and ratios, of each case."""
    dtypes = options.reduce_dtype or ["float32", "bfloat16", "float16"]
    cases = [Case(*one) for one in itertools.product(options.gbits or [1.0], dtypes, options.bucket_mib or [None])]
    found: dict[Case, list[Found]] = {case: [] for case in cases}
    with network(options.workers):
        for number in range(options.rounds):
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                hold(options.workers, case.gbits)
                found[case].append(run(options, case))
                told = f"round {number + 1}/{options.rounds}: {case}: {found[case][-1]}"
                print(told, file=sys.stderr, flush=True)
    rows = []
    for case, own in found.items():
        first = next(runs for other, runs in found.items() if other.gbits == case.gbits)
        sent = statistics.median(one.sent for one in own)
        rows.append(
            {
                **case._asdict(),
                "seconds": spread([one.seconds for one in own]),
                "sent_mb": round(sent / 1e6, 1),
                "sending_seconds": round(sent * 8 / (case.gbits * 1e9), 4),
                "rate_ratio": spread([base.seconds / one.seconds for base, one in zip(first, own, strict=True)]),
                **{key: spread([one.trace[key] for one in own]) for key in own[0].trace},
            }
        )
    return {"workers": options.workers, "model": options.model, "rounds": options.rounds, "runs": rows}


def run(options: argparse.Namespace, case: Case) -> Found:
    """Trains with these workers, each in its namespace."""
    recipe, examples, bindings = _MODELS[options.model]
    steps, traced = _WARM_UP + _TRACED + options.steps, _WARM_UP + options.steps // 2
    bindings = [
        *_COMMON,
        *bindings,
        f"train.global_batch_size = {examples * options.workers}",
        f"train.steps = {steps}",
        "train.log_every = 1",
        f"train.reduce_dtype = '{case.reduce_dtype}'",
        f"train.bucket_bytes = {case.bucket_mib * 2**20 if case.bucket_mib else None}",
    ]
    command = [sys.executable, "-m", "launcher.main", f"--gin_file={recipe}", "--mode=train"]
    command += [f"--gin_param={binding}" for binding in bindings]
    command += [f"--profile_steps={traced + 1}:{traced + _TRACED}"]
    peers = [f"{_address(index)}:5000" for index in range(options.workers)]
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
        metrics = Path(folder, "run", "metrics.jsonl")
        # The first weights cross the wire as well, so counting begins when some steps have been taken.
        while len(_rows(metrics)) < _WARM_UP and processes[0].poll() is None:
            time.sleep(0.02)
        before = _bytes_sent()
        if any(process.wait() for process in processes):
            raise SystemExit(Path(folder, "0.log").read_text())
        sent = _bytes_sent() - before
        rows = _rows(metrics)
        (trace,) = Path(folder, "run", "tensorboard").rglob("*.xplane.pb")
        shown = overlap(trace)
    outside = [row for row in rows if row["step"] > _WARM_UP and not 0 <= row["step"] - traced <= _TRACED + 1]
    taken = [examples * options.workers / row["examples_per_second"] for row in outside]
    return Found(statistics.median(taken), sent / (steps - _WARM_UP), shown)


def _rows(metrics: Path) -> list[dict[str, float]]:
    """A row for each step so far."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [row for row in (json.loads(line) for line in lines if line.endswith("\n")) if row["split"] == "train"]


def overlap(trace: Path) -> dict[str, float]:
    """Of a step: how long collectives work, the share of it beside the backward pass, and how long that takes."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    steps: list[Interval] = []
    collectives: list[Interval] = []
    backward: list[Interval] = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                begun = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                interval = (begun, begun + event.duration_ps / 1e12)
                if name == "_run_batches_in_graph":
                    steps.append(interval)
                elif name.endswith(":CollectiveReduceV2"):
                    collectives.append(interval)
                elif "gradient_tape/" in name:
                    backward.append(interval)
    if not (steps and collectives and backward):
        found = f"{len(steps)} steps, {len(collectives)} collectives, {len(backward)} operations of the backward pass"
        raise SystemExit(f"{trace} shows {found}")
    busy = beside = passes = 0.0
    for step in steps:
        sending, computing = (_within(step, _joined(every)) for every in (collectives, backward))
        busy += sum(end - begin for begin, end in sending)
        beside += sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sending for b in computing)
        passes += computing[-1][1] - computing[0][0]
    return {
        "collective_seconds": busy / len(steps),
        "beside_backward": beside / busy,
        "backward_seconds": passes / len(steps),
    }


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """The times that any of them covers."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _within(whole: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    return [(begin, end) for begin, end in intervals if whole[0] <= begin < whole[1]]


@contextlib.contextmanager
def network(workers: int) -> Iterator[None]:
    """Namespaces joined by a bridge."""
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
        yield


def hold(workers: int, gbits: float) -> None:
    """Has each worker send `gbits` a second at most."""
    held = ("tbf", "rate", f"{gbits}gbit", "burst", f"{max(1, round(gbits))}mb", "latency", "100ms")
    for index in range(workers):
        _run("tc", "-n", _worker(index), "qdisc", "replace", "dev", "wire", "root", *held)


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
