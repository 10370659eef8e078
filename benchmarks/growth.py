"""How cost grows with work: figures for more and more of one thing. Prints JSON.

    python benchmarks/growth.py supervisor --sizes=8,32,128,256   # of workers that stand in for real ones; Linux
    python benchmarks/growth.py workers --sizes=1,2,4,8           # processes of one job that train on this machine
    python benchmarks/growth.py replicas --sizes=1,2,4,8          # mirrored CPU devices of one process
    python benchmarks/growth.py state --sizes=100,400,1600,4000   # MB of a checkpoint; Linux
    python benchmarks/growth.py examples --sizes=10000,100000,1000000,10000000,100000000  # Linux
    python benchmarks/growth.py v5e_chips --sizes=4,16,64,256     # of the slice that preflight compiles for
    python benchmarks/growth.py v5p_chips --sizes=4,16,64,256,1024

Each size is measured in a process of its own, and preflight keeps nothing between them. RESULTS.md has the exponents.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from measuring import cpu_seconds

HERE = Path(__file__).resolve().parent
_WINDOW_SECONDS = 10.0


def main() -> None:
    kinds: dict[str, Callable[[int], dict[str, float]]] = {
        "supervisor": supervisor, "workers": workers, "replicas": replicas, "state": state, "examples": examples,
        "v5e_chips": lambda count: chips(f"v5litepod-{count}", count),
        "v5p_chips": lambda count: chips(f"v5p-{2 * count}", count),  # called by cores
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--sizes", required=True, help="increasing numbers, with commas")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # of one size, as JSON
    options = parser.parse_args()
    sizes = [int(word) for word in options.sizes.split(",")]
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    if options.one:
        print(json.dumps(kinds[options.kind](sizes[0])))
        return
    rows = []
    for size in sizes:
        figures = _in_a_fresh_process(options.kind, size)
        print(f"{options.kind} {size:,}: {figures}", file=sys.stderr, flush=True)
        rows.append({"size": size, "figures": figures})
    print(json.dumps({"kind": options.kind, "rows": rows}, indent=2))


def supervisor(workers: int) -> dict[str, float]:
    """The memory and processor time of `launcher.launch`, and how soon it notices a kill."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model_dir = Path(folder, "run")
        command = [sys.executable, "-m", "launcher.launch", f"--workers={workers}", "--worker_module=idle_worker"]
        command += ["--gin_file=mlp_fashion.gin", "--max_restarts=0", f"--model_dir={model_dir}"]
        begun = time.monotonic()
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(_end, job)
        process = psutil.Process(job.pid)
        _until(lambda: sum(_is_worker(child) for child in process.children(recursive=True)) == workers)
        started = time.monotonic() - begun
        before, since = _cpu_seconds(process), time.monotonic()
        _until(lambda: time.monotonic() - since >= _WINDOW_SECONDS)
        used = (_cpu_seconds(process) - before) / (time.monotonic() - since)
        memory = process.memory_info().rss
        last = [child for child in process.children(recursive=True) if _is_worker(child)][-1]
        os.kill(last.pid, signal.SIGKILL)
        killed = time.time()
        error = model_dir / "logs" / "attempt_1" / "error.json"
        _until(lambda: error.exists() and "time" in _json(error))
        noticed = _json(error)["time"] - killed
        _until(lambda: job.poll() is not None)
        return {
            "all started, s": started,
            "memory, MB": memory / 1e6,
            "processor seconds a second": used,
            "kill noticed after, s": noticed,
            "ended after, s": time.time() - killed,
        }


def workers(count: int) -> dict[str, float]:
    """Until a job has taken the first steps of a small model, and a step, of which each worker has as much to do."""
    before, after = 20, 1020
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model_dir = Path(folder, "run")
        bindings = [
            "image_data.name = 'digits'", "mlp.units = 64", f"train.global_batch_size = {8 * count}",
            f"train.steps = {after}", "train.log_every = 20", "train.steps_per_loop = 20",
        ]  # fmt: skip
        command = [sys.executable, "-m", "launcher.launch", f"--workers={count}", "--mode=train"]
        command += ["--gin_file=mlp_fashion.gin", "--max_restarts=0", f"--model_dir={model_dir}"]
        begun = time.monotonic()
        job = subprocess.Popen(
            [*command, *(f"--gin_param={binding}" for binding in bindings)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(_end, job)
        process = psutil.Process(job.pid)
        _until(lambda: _logged(model_dir, before))
        first, used = time.monotonic() - begun, _cpu_seconds_of_all(process)
        if job.wait() != 0:
            raise SystemExit(f"a job of {count} workers ended with exit code {job.returncode}")
        rows = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
        seconds = statistics.median(8 * count / row["examples_per_second"] for row in rows if row["step"] > before)
    return {f"step {before}, s": first, "until then, CPU s": used, "a step, ms": seconds * 1e3}


def replicas(count: int) -> dict[str, float]:
    """Processor seconds until the first step has been taken, and of a step, of which each replica has as much to do."""
    from launcher.config import gin_bindings
    from launcher.run import loading, session
    from launcher.run.recipe import Recipe

    loading.import_builtins()
    bindings = ["image_data.name = 'digits'", "mlp.units = 64", f"train.global_batch_size = {8 * count}"]
    gin_bindings.load(["mlp_fashion.gin"], bindings)
    begun = time.process_time()
    built = session.build(loading.Machine(environ={}, replicas=count, seed=0).plan_of(Recipe()))
    batches = built.trainer.batches(built.plan.data)
    built.trainer.train(batches, 1)
    until_first = time.process_time() - begun
    steps = 200
    built.trainer.train(batches, steps)
    begun = time.process_time()
    built.trainer.train(batches, steps)
    return {"first step, CPU s": until_first, "a step, CPU ms": (time.process_time() - begun) / steps * 1e3}


def state(megabytes: int) -> dict[str, float]:
    """Seconds to write a checkpoint, to verify it, and to read it, from the page cache; TensorFlow is there already."""
    import numpy as np

    from launcher.checkpoints.store import CheckpointStore

    array = np.random.default_rng(0).standard_normal(25_000_000 // 4, np.float32)  # 25 MB
    arrays = {f"weight_{index}": array for index in range(megabytes // 25)}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIR")) as folder:
        CheckpointStore(f"{folder}/first").save(1, {"weight": array[:1]})  # imports TensorFlow: seconds
        _have_memory(3 * megabytes)
        times = [time.monotonic()]
        store = CheckpointStore(f"{folder}/checkpoints")
        store.save(1, arrays)
        times.append(time.monotonic())
        store.latest()
        times.append(time.monotonic())
        store.read(1)
        times.append(time.monotonic())
    saved, verified, read = (after - before for before, after in itertools.pairwise(times))
    return {"written, s": saved, "verified, s": verified, "read, s": read, "peak memory, MB": _peak_megabytes()}


def examples(count: int) -> dict[str, float]:
    """Until the first batch, from the beginning and from a position in the middle of the fifth pass."""
    import numpy as np

    from launcher.data.keras_data import make_data
    from launcher.data.pipeline import Shard

    _have_memory(count * 60 // 1_000_000)
    data, _ = make_data((np.zeros([count, 4], np.float32), np.zeros([count], np.int32)), None, shuffle=True)
    figures = {}
    for name, step in (("first batch, s", 0), ("batch of the fifth pass, s", count * 4 // 32 + 7)):
        shard = Shard(global_batch_size=32, num_replicas=1, first_replica=0, local_replicas=1, seed=0, start_step=step)
        begun = time.monotonic()
        next(iter(data.train_batches(shard)))
        figures[name] = time.monotonic() - begun
    return {**figures, "peak memory, MB": _peak_megabytes()}


def chips(name: str, count: int) -> dict[str, float]:
    """`--mode=preflight` of a small ResNet for a slice of so many chips, eight images on each replica."""
    bindings = ["resnet.depth = 8", "resnet.norm_group_size = None", f"train.global_batch_size = {8 * count}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher.main", "--mode=preflight", "--gin_file=resnet_cpu.gin"]
        command += [f"--tpu_type={name}", f"--preflight_cache={folder}/cache", f"--model_dir={folder}"]
        command += [f"--gin_param={binding}" for binding in bindings]
        begun, used = time.monotonic(), cpu_seconds(resource.RUSAGE_CHILDREN)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds, used = time.monotonic() - begun, cpu_seconds(resource.RUSAGE_CHILDREN) - used
        (case,) = json.loads(Path(folder, "preflight.json").read_text())["cases"]
        (compiled,) = Path(folder, "cache").glob("*.json.gz")
        program = json.loads(gzip.decompress(compiled.read_bytes()))["hlo"]
    return {
        "preflight, s": seconds,
        "preflight, CPU s": used,
        "compile, s": case["compile_seconds"],
        "program as text, kB": len(program) / 1e3,
        "machine code, MB": case["hbm"]["code"] / 1e6,
    }


def _in_a_fresh_process(kind: str, size: int) -> dict[str, float]:
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, kind, f"--sizes={size}", "--one"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "idle_worker" in process.cmdline()
    return False


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.terminate()
    job.wait()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened in 300 s")
        time.sleep(0.05)


def _json(path: Path) -> dict[str, float]:
    with contextlib.suppress(ValueError):
        return json.loads(path.read_text())
    return {}


def _logged(model_dir: Path, step: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return any(json.loads(line)["step"] >= step for line in (model_dir / "metrics.jsonl").read_text().splitlines())
    return False


def _cpu_seconds_of_all(process: psutil.Process) -> float:
    """Of a process and those that it started and that still run."""
    used = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            used += _cpu_seconds(one)
    return used


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _have_memory(megabytes: int) -> None:
    """Has a virtual machine get this memory from its host, which may take seconds a gigabyte, and forgets the peak."""
    import numpy as np

    np.ones(megabytes * 1_000_000, np.uint8)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_megabytes() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    main()
