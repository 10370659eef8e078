"""What an installed package adds by entry points: a mode, a backend, a runtime, a sink; asked for only where needed."""

from __future__ import annotations

import re

import pytest
from places import PYTHONPATH, SMALL_DIGITS

from launcher import main, modes
from launcher.errors import UsageError
from launcher.run import loading

ENTRIES = """
[launcher.modes]
ring = ringing:RING
broken = ringing:MISSING
number = ringing:NUMBER

[launcher.backends]
over = ringing:OVER

[launcher.engines]
eager = ringing:EAGER

[launcher.sinks]
Bell = bell:Bell
Crack = crack:Crack
"""
# Of what a supervisor reads, too, which imports no TensorFlow.
RINGING = """
import dataclasses

from launcher.jobs.backends import on_hosts
from launcher.jobs.transports import Host, by_command
from launcher.machine.runtime_kinds import RuntimeKind
from launcher.modes import Mode, Request, flag

@dataclasses.dataclass(frozen=True, kw_only=True)
class RingRequest(Request):
    times: int = flag("how often.", 1)

RING = Mode("ring", "rings", module="ring", request=RingRequest, needs_recipe=False, needs_tensorflow=False)
NUMBER = 3
OVER = on_hosts("over there", lambda options: by_command((Host(name="there", address="there"),), "carry {command}"))

def devices(replicas, cluster, environ):
    from launcher.machine.devices import StrategyPlan
    of = {"num_replicas": 1, "local_replicas": 1, "devices": ("CPU:0",), "accelerator": "cpu", "runtime": EAGER}
    return StrategyPlan(kind="eager", why="nothing is traced", **of)

def make(plan):
    from eager_runtime import EagerRuntime
    return EagerRuntime()

EAGER = RuntimeKind(name="eager", says="nothing is traced", make=make, devices=devices)
"""
BELL = """
import gin
from launcher.reporting.sinks import Sink

@gin.configurable
class Bell(Sink):
    def train(self, event):
        print(f"ding at {event['step']}")  # in one write: the console may write meanwhile
"""


@pytest.fixture
def env(tmp_path):
    """The environment of processes for which a package is installed."""
    about = tmp_path / "ringing-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ringing\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "ringing.py").write_text(RINGING)
    (tmp_path / "ring.py").write_text("def run(request):\n    print('ding ' * request.times)\n    return 0\n")
    (tmp_path / "bell.py").write_text(BELL)
    (tmp_path / "crack.py").write_text("import nothing_like_it\n")
    return {"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}"}


def test_a_package_adds_a_mode_with_flags_of_its_own(run_launcher, env):
    done = run_launcher("--mode=ring", "--times=3", env=env)
    assert (done.returncode, done.stdout) == (0, "ding ding ding \n"), done.stderr
    done = run_launcher("--help", env=env)
    assert done.returncode == 0 and "|ring|broken|number\n" in done.stdout and "; ring rings;" in done.stdout
    assert "number cannot be used (--mode=number: ringing:NUMBER is no launcher.modes.Mode, but int)" in done.stdout


def test_a_package_adds_a_runtime_and_a_sink_and_both_train(run_launcher, env, tmp_path):
    bindings = [f"--gin_param={one}" for one in ("train.steps = 4", "train.log_every = 2", "train.sinks = [@Bell()]")]
    flags = (f"--gin_file={SMALL_DIGITS}", f"--model_dir={tmp_path / 'run'}", *bindings)
    done = run_launcher(*flags, "--engine=eager", env=env)
    assert done.returncode == 0, done.stderr
    assert "eager (nothing is traced)" in done.stdout
    assert re.findall(r"ding at (\d+)", done.stdout) == ["2", "4"]


def test_a_package_adds_a_backend(run_launcher, env, tmp_path):
    flags = ("--backend=over", f"--gin_file={SMALL_DIGITS}", f"--model_dir={tmp_path / 'run'}", "--dry_run")
    done = run_launcher(*flags, env=env, module="launcher.launch")
    assert done.returncode == 0, done.stderr
    assert "carry env -C" in done.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--mode=rin", "--mode=rin: there is no such mode among train, "),
        ("--mode=rin", "number; did you mean 'ring'?"),
        ("--mode=broken", "--mode=broken: ringing has it as ringing:MISSING, which cannot be imported (AttributeError"),
        ("--mode=number", "--mode=number: ringing:NUMBER is no launcher.modes.Mode, but int"),
    ],
)
def test_a_name_that_no_package_has_or_that_is_broken_is_one_message(run_launcher, env, given, said):
    done = run_launcher(f"--gin_file={SMALL_DIGITS}", given, "--dry_run", env=env)
    assert done.returncode == 64, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_a_sink_that_no_package_has_or_that_is_broken_is_one_message(env, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (("Bel", "did you mean 'Bell'"), ("Crack", "has Crack as crack:Crack: import crack failed: ")):
        with pytest.raises(UsageError, match=said):
            loading.load([SMALL_DIGITS], [f"train.sinks = [@{name}()]"], before_imports=lambda: None)


def test_packages_are_not_asked_for_names_that_are_here(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    request = modes.make_request(main.parse(["launcher", "--mode=eval", f"--gin_file={SMALL_DIGITS}"]))
    assert request.runtime.name == "tensorflow"
    loading.load(request.gin_file, request.gin_param, before_imports=lambda: None)
