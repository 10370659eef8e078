"""A worker as the supervisor sees it, without TensorFlow: trains in step with its peers, reports, and fails on demand.

FAKE_WORKER in the environment is a JSON object:
  steps: steps to train; 0 for: until the first attempt has come to its end, and 3 more in the next one
  checkpoint: whether the chief leaves a (hollow) checkpoint after every step, from which the next attempt goes on
  hollow: whether checkpoints hold no data (default); else every one verifies or is skipped
  weights: what they hold
  trusting: whether the next attempt goes on from the newest without looking
  wait_for_fault: step at which the first attempt waits for what is done to it
  disk_full: "stop" (default) or "continue": what a checkpoint that cannot be written means
  on_sigterm: "die" (default), "save" (leave with 42) or "ignore"
  hosts: whether peers are on several hosts, which share model_dir and, here, a kernel
  show: variables of the environment that it prints first, as far as they are set
  faults: [{"rank", "attempt" (0: every one), "step", "do": the name of a function below, and its arguments}]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from pathlib import Path

from launcher import errors
from launcher.machine.cluster import resolve
from launcher.worker import drill, preemption
from launcher.worker.preemption import StopRequest
from launcher.worker.progress import Progress, install_stack_dump, record_error

DEFAULTS = {
    "weights": "weights",
    "wait_for_fault": 0,
    "steps": 4,
    "checkpoint": False,
    "hollow": True,
    "trusting": False,
    "disk_full": "stop",
    "on_sigterm": "die",
    "hosts": False,
    "show": [],
}
SETTINGS = {**DEFAULTS, "faults": [], **json.loads(os.environ["FAKE_WORKER"])}
CLUSTER = resolve(os.environ)
RANK, WORKERS = CLUSTER.index, CLUSTER.num_workers
MODEL_DIR = Path(next(argument.partition("=")[2] for argument in sys.argv if argument.startswith("--model_dir=")))
PROGRESS_FILE = Path(os.environ["LAUNCHER_PROGRESS_FILE"])
ATTEMPT = int(os.environ["LAUNCHER_ATTEMPT"].rpartition("/")[2])
# Where the peers of one attempt find each other.
MEETING = (MODEL_DIR if SETTINGS["hosts"] else PROGRESS_FILE.parent) / f"meeting_{ATTEMPT}"


def inside_tensorflow(function):
    """Makes a function's frames look as TensorFlow's do: where a worker waits for its peers, there is no other."""
    function.__code__ = _renamed(function.__code__)
    return function


def _renamed(code):
    constants = tuple(_renamed(value) if isinstance(value, types.CodeType) else value for value in code.co_consts)
    return code.replace(co_filename="/x/tensorflow/python/eager/execute.py", co_consts=constants)


@inside_tensorflow
def quick_execute(condition):
    while not condition():
        time.sleep(0.005)


asked_to_stop = StopRequest()
progress = Progress(os.environ)


def say(text):
    print(text, flush=True)


def mark(name):
    (MEETING / f"{name}_{RANK}").touch()


@inside_tensorflow
def marked(name):
    return len(list(MEETING.glob(f"{name}_*")))


@inside_tensorflow
def state(rank):
    """Of its process, the letter that proc(5) names; X where it has gone."""
    try:
        return Path(f"/proc/{(MEETING / f'pid_{rank}').read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@inside_tensorflow
def alive(rank):
    return state(rank) not in "ZX"


@inside_tensorflow
def peers():
    return [rank for rank in range(WORKERS) if rank != RANK]


@inside_tensorflow
def collective(step):
    """Ends when all workers are there. When one has gone, the others go, too, as TensorFlow's service makes them."""
    mark(f"step{step}")

    def over():
        if marked(f"step{step}") == WORKERS:
            return True
        if marked("leaving") or not all(alive(rank) for rank in peers()):
            say("UNAVAILABLE: a peer has gone")
            os._exit(1)
        return False

    quick_execute(over)


# ------------------------------------------------------------------------------------------------------------- faults


def leave(code):
    say(f"leaving with {code}")
    os._exit(code)


def raise_error(kind, message, code, after_peers=False, until=None):
    """As launcher.main ends: the error is recorded and printed, then the process leaves, sooner or later; not any more
    once somebody has left a file of the name `until`."""
    if until and (MODEL_DIR / until).exists():
        return
    try:
        raise getattr(errors, kind, type(kind, (Exception,), {}))(message)
    except Exception as error:
        record_error(os.environ, error, code)
        traceback.print_exc()
    if after_peers:
        mark("leaving")
        quick_execute(lambda: not any(alive(rank) for rank in peers()))
    os._exit(code)


def segfault_after_peers():
    mark("leaving")
    quick_execute(lambda: not any(alive(rank) for rank in peers()))
    os.kill(os.getpid(), signal.SIGSEGV)


def send_self(number):
    os.kill(os.getpid(), number)


def read_next_batch():
    say("reading a batch that never comes")
    threading.Event().wait()


def print_much():
    for _ in range(40):
        say("x" * 100_000)


def exit_when_sent(name, code=1):
    quick_execute(lambda: (MODEL_DIR / name).exists())
    os._exit(code)


def exit_when_peers_are_frozen(code=1):
    quick_execute(lambda: all(state(rank) == "T" for rank in peers()))
    os._exit(code)


def start_children():
    """One that stays in the group and one that leaves it; both would live for ever."""
    sleep = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    with open(MODEL_DIR / "children", "a") as file:
        file.write("".join(f"{child.pid}\n" for child in children))


def wait_for_sigterm():
    say("waiting for SIGTERM")
    quick_execute(asked_to_stop)


def name_straggler(worker):
    progress.straggler = worker


def start_slowly():
    """As a worker that still imports TensorFlow: a SIGTERM ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say("starting slowly")
    threading.Event().wait()


FAULTS = (
    leave, raise_error, segfault_after_peers, send_self, read_next_batch, print_much, exit_when_sent,
    exit_when_peers_are_frozen, start_children, wait_for_sigterm, name_straggler, start_slowly,
)  # fmt: skip
BY_NAME = {function.__name__: function for function in FAULTS}


def misbehave(step):
    for fault in SETTINGS["faults"]:
        if fault["rank"] == RANK and fault.get("attempt", 1) in (0, ATTEMPT) and fault["step"] == step:
            if SETTINGS["checkpoint"] and step not in ("start", "end", 0):
                quick_execute(checkpoint(step).exists)  # so that every run of a test goes on from the same step
            known = ("rank", "attempt", "step", "do")
            BY_NAME[fault["do"]](**{name: value for name, value in fault.items() if name not in known})


# ----------------------------------------------------------------------------------------------------------- training


def save(step):
    """A checkpoint without tensors: complete, as far as the supervisor looks; with some bytes, if it is not hollow."""
    contents = {"state.index": b""}
    if not SETTINGS["hollow"]:
        contents["state.data"] = f"{SETTINGS['weights']} after {step} steps".encode() * 100
    files = {name: {"size": len(one), "sha256": hashlib.sha256(one).hexdigest()} for name, one in contents.items()}
    manifest = {"format": 1, "step": step, "time": 0.0, "files": files, "tensors": {}}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    folder = checkpoint(step)
    writing = folder.with_name(f".writing-{folder.name}")
    writing.mkdir(parents=True, exist_ok=True)
    drill.before_write()
    for name, content in contents.items():
        (writing / name).write_bytes(content)
    (writing / "manifest.json").write_text(json.dumps(manifest))
    if folder.exists():  # a damaged one, or of a step that is repeated
        folder.rename(folder.with_name(f"old-{ATTEMPT}-{folder.name}"))
    writing.rename(folder)


def fail_as_drilled():
    try:
        drill.between_steps()
    except OSError as error:
        raise_error(type(error).__name__, str(error), 75)


def save_or_fail(step):
    try:
        save(step)
    except OSError as error:
        if SETTINGS["disk_full"] == "stop":
            raise_error("CheckpointWriteError", str(error), 75)
        say(f"going on without a checkpoint of step {step}: {error}")
        (MODEL_DIR / ".last_step").write_text(str(step + 3))
        (MODEL_DIR / ".last_step").rename(MODEL_DIR / "last_step")


def checkpoint(step):
    return MODEL_DIR / "checkpoints" / f"step_{step:08d}"


def first_step():
    if not SETTINGS["hollow"] and not SETTINGS["trusting"]:
        from launcher.checkpoints import CheckpointStore  # with NumPy, which most tests need not wait for

        return CheckpointStore(str(MODEL_DIR / "checkpoints")).latest() or 0
    steps = [int(path.name.removeprefix("step_")) for path in (MODEL_DIR / "checkpoints").glob("step_*")]
    return max(steps, default=0)


def last_step(first):
    if SETTINGS["steps"]:
        return SETTINGS["steps"]
    if ATTEMPT > 1:
        return first + 3
    path = MODEL_DIR / "last_step"  # which somebody leaves who goes on after a fault
    return int(path.read_text()) if path.exists() else sys.maxsize


def main():
    install_stack_dump(os.environ)
    drill.install(os.environ)
    if SETTINGS["on_sigterm"] == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with asked_to_stop.installed() if SETTINGS["on_sigterm"] == "save" else contextlib.nullcontext():
        return train()


def train():
    MODEL_DIR.mkdir(parents=True, exist_ok=True)
    MEETING.mkdir(parents=True, exist_ok=True)
    (MEETING / f".pid_{RANK}").write_text(str(os.getpid()))
    os.rename(MEETING / f".pid_{RANK}", MEETING / f"pid_{RANK}")
    with open(MODEL_DIR / "pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    misbehave("start")
    progress.report(phase="startup")
    quick_execute(lambda: marked("pid") == WORKERS)
    step = first_step()
    for name in SETTINGS["show"]:
        if name in os.environ:
            say(f"{name}={os.environ[name]}")
    say(f"training from step {step}, {' '.join(sys.argv[1:])}")
    if "LAUNCHER_FULL_WORKERS" in os.environ:
        say(f"one of {WORKERS} for {os.environ['LAUNCHER_FULL_WORKERS']}")
    progress.report(phase="compile", step=step)
    first = step
    while step < last_step(first):
        misbehave(step)
        fail_as_drilled()
        if ATTEMPT == 1 and step and step == SETTINGS["wait_for_fault"]:
            quick_execute(lambda: any(not alive(rank) for rank in peers()))
        if asked_to_stop():
            mark(f"stop{step}")  # before the collective, so that after it all know
        collective(step)
        time.sleep(0.005)  # or an endless run of one worker takes a core
        stopping = marked(f"stop{step}")
        step += 1
        progress.report(phase="train", step=step)
        if SETTINGS["checkpoint"] and RANK == 0:
            progress.report(phase="checkpoint", step=step)
            save_or_fail(step)
            progress.report(phase="train", step=step)
        if stopping:
            # A worker may know from its peers that it is to stop before it is told itself.
            preemption.ignore_repeats()
            say(f"saved at step {step}")
            return 42
    misbehave("end")
    say("done")
    return 0


if __name__ == "__main__":
    code = main()
    preemption.ignore_repeats()  # as launcher.main
    sys.exit(code)
