"""A slice that is there is set up on all hosts and trained on from host 0, by a stand-in for gcloud that runs what it
is told on this machine: the real start-up script, and the real launcher.launch with a worker without TensorFlow."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from launched import LaunchedJob
from places import ROOT

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the scripts are bash"), pytest.mark.slow]

# A slice of two hosts, whose /tmp is a folder. --output-directory gets a file a host, as documented.
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"NOTES/gcloud"
case "$*" in
  *" describe "*) cat NOTES/node; exit "$(cat NOTES/code)" ;;
  *" scp "*) cp "$5" NOTES/tpu_vm_startup.sh; exit ;;
esac
workers="0"; logs=""
for word in "$@"; do
  case "$word" in
    --command=*) command="${word#--command=}" ;;
    --worker=all) workers="0 1" ;;
    --output-directory=*) logs="${word#*=}" ;;
  esac
done
command="${command//\/tmp\/tpu_vm_startup.sh/NOTES/tpu_vm_startup.sh}"
for worker in $workers; do
  if [[ -n "$logs" ]]; then
    { echo "host $worker"; bash -c "$command"; } >"$logs/$worker.log"
  else
    env -u PYTHONPATH bash -c "$command" || exit
  fi
done
"""
INSTALL = r"""#!/usr/bin/env bash
mkdir -p "$VENV/bin"
touch "$VENV/pyvenv.cfg"
printf 'install %s\n' "$(cat "${PIP_CONSTRAINT:-/dev/null}")" >>NOTES/installs
printf '#!/bin/sh\nexec REAL "$@"\n' >"$VENV/bin/python"
chmod +x "$VENV/bin/python"
"""


FAKE = ("--worker_module=fake_worker", "--env=FAKE_WORKER", "--gin_file=fake.gin", "--max_restarts=0")
JAX_SLICE = "READY,v4-16,tpu-ubuntu2204-base,127.0.0.1;127.0.0.2"


class Slice:
    def __init__(self, folder, environ):
        self.folder, self.notes, self.environ, self.process = folder, folder / "notes", environ, None
        self.repository = folder / "repository"
        for name, text in (
            ("bin/gcloud", GCLOUD), ("bin/sudo", '#!/bin/sh\nexec "$@"\n'), ("bin/journalctl", "#!/bin/sh\necho tpu\n"),
            ("repository/scripts/install.sh", INSTALL),
        ):  # fmt: skip
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("NOTES", str(self.notes)).replace("REAL", sys.executable))
            path.chmod(0o755)
        self.notes.mkdir()
        self.node("READY,v5litepod-16,tpu-vm-tf-2.20.0-pod-pjrt-v5e-and-v6")
        for words in (
            ("init", "--quiet"), ("add", "--all"),
            ("-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "--message=x"),
        ):  # fmt: skip
            subprocess.run(["git", "-C", self.repository, *words], check=True)

    def node(self, answer, code=0):
        (self.notes / "node").write_text(f"{answer}\n")
        (self.notes / "code").write_text(str(code))

    def train(self, *flags, worker=FAKE):
        process = self.start(*flags, worker=worker)
        out, err = process.communicate(timeout=90)
        return subprocess.CompletedProcess(flags, process.returncode, out, err)

    def start(self, *flags, worker=FAKE):
        words = ("--node=my-tpu", "--zone=z", f"--source={self.repository}", f"--home={self.folder}/opt")
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [str(ROOT / "scripts" / "tpu_pod_train.sh"), *words, *worker, f"--model_dir={self.folder}/run", *flags],
            env={**os.environ, **self.environ, "PATH": path, "PYTHON": sys.executable},
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        return self.process

    def close(self):
        """Kills what is left; the supervisor's own guard and agent end the worker with it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()

    @property
    def told(self):
        path = self.notes / "gcloud"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def tpu(tmp_path, fake_environment):
    """tpu(**settings of fake_worker): a slice of two hosts."""
    made = []

    def make(**settings):
        made.append(Slice(tmp_path, fake_environment(**settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert LaunchedJob(None, one.folder / "run").running() == []


def test_all_hosts_are_set_up_host_0_trains_and_all_logs_are_here(tpu):
    slice_ = tpu(show=["TPU_NAME", "TPU_LOAD_LIBRARY", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"])
    done = slice_.train()
    assert done.returncode == 0, done.stderr
    assert (slice_.notes / "installs").read_text() == "install tensorflow-tpu==2.20.0\n"  # both hosts are one here
    log = (slice_.folder / "run/logs/attempt_1/worker_0.log").read_text()
    assert "TPU_NAME=my-tpu" in log and "TPU_LOAD_LIBRARY=0" in log and "PLUGGABLE" not in log
    assert log.endswith("done\n")
    assert [line.split()[3] for line in slice_.told] == ["describe", "scp", "ssh", "ssh", "ssh"]
    assert [("--worker=all" in line, "--worker=0" in line) for line in slice_.told[1:]] == [
        (True, False), (True, False), (False, True), (True, False)
    ]  # fmt: skip
    for host in (0, 1):
        text = (slice_.folder / f"tpu_logs/my-tpu/{host}.log").read_text()
        assert text.startswith(f"host {host}\n") and "installing" in text and text.endswith("tpu\n")


def test_an_image_whose_version_pypi_lacks_gets_the_nearest_and_says_so(tpu):
    slice_ = tpu()
    slice_.node("READY,v5litepod-16,tpu-vm-tf-2.19.0-pod-pjrt")
    done = slice_.train()
    assert done.returncode == 0 and "note: pods of TensorFlow 2.19.0 hang" in done.stderr
    assert (slice_.notes / "installs").read_text() == "install tensorflow-tpu==2.19.1\n"


def test_its_exit_code_is_the_trainings_and_the_logs_are_fetched_all_the_same(tpu):
    fault = {"rank": 0, "step": 2, "do": "raise_error", "kind": "ValueError", "message": "no", "code": 70}
    slice_ = tpu(faults=[fault])
    done = slice_.train()
    assert done.returncode == 70, done.stderr
    assert (slice_.folder / "tpu_logs/my-tpu/1.log").exists()


def test_what_cannot_be_set_up_is_not_trained_on(tpu):
    slice_ = tpu()
    done = slice_.train(f"--source={slice_.folder}/nowhere")
    assert done.returncode == 75 and "could not all be set up" in done.stderr
    assert not (slice_.folder / "run").exists()


def test_told_to_stop_it_saves_and_still_fetches_the_logs(tpu, eventually):
    slice_ = tpu(on_sigterm="save", faults=[{"rank": 0, "step": 2, "do": "wait_for_sigterm"}])
    process = slice_.start()
    log = slice_.folder / "run/logs/attempt_1/worker_0.log"
    eventually(lambda: log.exists() and "waiting for SIGTERM" in log.read_text())
    process.terminate()  # the script alone
    process.communicate(timeout=90)
    assert process.returncode == 42 and "saved at step 3" in log.read_text()
    assert (slice_.folder / "tpu_logs/my-tpu/1.log").exists()


def test_ctrl_c_saves_too(tpu, eventually):
    slice_ = tpu(on_sigterm="save", faults=[{"rank": 0, "step": 2, "do": "wait_for_sigterm"}])
    process = slice_.start()
    log = slice_.folder / "run/logs/attempt_1/worker_0.log"
    eventually(lambda: log.exists() and "waiting for SIGTERM" in log.read_text())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    process.communicate(timeout=90)
    assert process.returncode == 42 and "saved at step 3" in log.read_text()
    assert (slice_.folder / "tpu_logs/my-tpu/1.log").exists()


def test_a_node_of_one_host_counts_its_own_chips(tpu):
    slice_ = tpu(show=["TPU_NAME", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"])
    slice_.node("READY,v5litepod-8,v2-alpha-tpuv5-lite")
    assert slice_.train().returncode == 0
    assert (slice_.notes / "installs").read_text() == "install \n"  # no TensorFlow on the image to agree with
    log = (slice_.folder / "run/logs/attempt_1/worker_0.log").read_text()
    assert "TPU_NAME" not in log and "TF_PLUGGABLE_DEVICE_LIBRARY_PATH=" in log


def test_with_jax_every_host_runs_the_program(tpu):
    slice_ = tpu(hosts=True, show=["TPU_NAME", "TPU_LOAD_LIBRARY", "TF_CONFIG", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"])
    slice_.node(JAX_SLICE)
    done = slice_.train("--engine=pjrt")
    assert done.returncode == 0, done.stderr
    assert (slice_.notes / "installs").read_text() == "install \n"  # no TensorFlow on the image to agree with
    assert any("--install_only" in line and "--engine=pjrt" in line for line in slice_.told)
    assert [sum(f"--worker={host} " in line for line in slice_.told) for host in (0, 1, 2)] == [1, 1, 0]
    for host in (0, 1):
        log = (slice_.folder / f"run/logs/attempt_1/worker_{host}.log").read_text()
        assert "127.0.0.1:" in log and "127.0.0.2:" in log and f'"index": {host}' in log
        assert "TPU_" not in log and "PLUGGABLE" not in log and log.endswith("done\n")


def test_with_jax_a_host_that_is_killed_is_named_and_all_come_back(tpu):
    killed = {"rank": 1, "step": 2, "do": "send_self", "number": int(signal.SIGKILL)}
    slice_ = tpu(hosts=True, faults=[killed], checkpoint=True)
    slice_.node(JAX_SLICE)
    done = slice_.train("--engine=pjrt", "--max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert "worker 1 was killed by SIGKILL" in done.stdout
    log = (slice_.folder / "run/logs/attempt_2/worker_1.log").read_text()
    assert log.startswith("training from step 2,")


@pytest.mark.heavy
@pytest.mark.nightly  # test_skypilot.py has two nodes, test_pjrt_engine.py two processes of JAX
def test_two_hosts_train_one_model_by_jax(tpu):
    slice_ = tpu()
    slice_.node(JAX_SLICE)
    recipe = (f"--gin_file={ROOT}/tests/support/small_digits.gin", "--gin_param=train.epochs = 1")
    done = slice_.train("--engine=pjrt", worker=(*recipe, "--env=JAX_PLATFORMS=cpu"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((slice_.folder / "run/summary.json").read_text())
    assert (summary["status"], summary["num_replicas"], summary["strategy"]) == ("completed", 8, "pjrt")


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("READY,v4-16,tpu-vm-tf-2.17.0-pod-pjrt,10.0.0.1;10.0.0.2", "take another, such as tpu-ubuntu2204-base"),
        ("READY,v4-16,tpu-ubuntu2204-base,10.0.0.1", "has 2 hosts, and gcloud names other addresses: 10.0.0.1"),
    ],
)
def test_with_jax_a_node_that_cannot_train_is_left_alone(tpu, node, said):
    slice_ = tpu()
    slice_.node(node)
    done = slice_.train("--engine=pjrt")
    assert done.returncode == 64 and said in done.stderr and done.stderr.count("\n") == 1
    assert len(slice_.told) == 1


@pytest.mark.parametrize(
    ("node", "code", "said"),
    [
        (("CREATING,v5litepod-16,tpu-vm-tf-2.20.0-pod-pjrt",), 75, "CREATING, not READY"),
        (("READY,v5litepod-16,v2-alpha-tpuv5-lite",), 64, "no TensorFlow worker runs on them"),
        (("READY,v5litepod-16,tpu-vm-tf-2.20.0-pjrt",), 64, "not tpu-vm-tf-X.Y.Z-pod-pjrt"),
        (("READY,v5litepod-16,tpu-vm-tf-2.15.0-pod-pjrt",), 64, "TensorFlow 2.15.0"),
        (("READY,v9-16,tpu-vm-tf-2.20.0-pjrt",), 64, "v9-16"),
    ],
)
def test_a_node_that_cannot_train_is_left_alone(tpu, node, code, said):
    slice_ = tpu()
    slice_.node(*node)
    done = slice_.train()
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == 1
    assert len(slice_.told) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--node="], "--node is missing"),
        (["--source=here"], "--source=here"),
        (["--home=opt"], "--home=opt"),
        (["--ref=-x"], "--ref=-x"),
        (["--zone=a b"], "--zone=a b"),
    ],
)
def test_a_mistake_is_one_message_before_anybody_is_asked(tpu, flags, said):
    slice_ = tpu()
    done = slice_.train(*flags)
    assert done.returncode == 64
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert slice_.told == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "name a recipe"),
        (["--gin_file=x.gin"], "--model_dir="),
        (["--gin_file=x.gin", "--model_dir=run"], "--model_dir="),
    ],
)
def test_recipe_and_folder_are_asked_for(flags, said):
    words = (ROOT / "scripts" / "tpu_pod_train.sh", "--node=n", "--source=https://example.com/x.git", *flags)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 64 and said in done.stderr


def test_a_dry_run_prints_the_commands_and_runs_none(tpu):
    slice_ = tpu()
    done = slice_.train("--dry_run", "--logs=my logs")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line.removeprefix("+ ")) for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert [words[4] for words in commands if words[0] == "gcloud"] == ["describe", "scp", "ssh", "ssh"]
    (launch,) = [words for words in commands if "launcher.launch" in words]
    assert {"--backend=tpu_vm", "--tpu_node=my-tpu", "--zone=z"} <= set(launch)
    assert f"--remote_python={slice_.folder}/opt/python" in launch
    assert "--output-directory=my logs" in commands[-1]
    assert slice_.told == [] and not (slice_.folder / "my logs").exists()


def test_a_dry_run_with_jax_names_all_hosts(tpu):
    done = tpu().train("--dry_run", "--engine=pjrt")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line.removeprefix("+ ")) for line in done.stdout.splitlines() if line.startswith("+ ")]
    (launch,) = [words for words in commands if "launcher.launch" in words]
    assert {"--engine=pjrt", "--hosts=<addresses of the hosts, with commas>"} <= set(launch)
    assert "--tpu=local" not in done.stdout
    assert commands[0][-1].endswith("runtimeVersion,networkEndpoints[].ipAddress)")


def test_tokens_and_values_of_variables_are_not_shown(tpu):
    flags = ("--source=https://me:s3cret@example.com/x.git", "--env=KEY=s3cret", "--env", "KEY=s3cret")
    done = tpu().train("--dry_run", *flags)
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert "HIDDEN@example.com/x.git" in done.stdout and "--env=KEY=HIDDEN" in done.stdout
    (setup,) = [line for line in done.stdout.splitlines() if "--install_only" in line]
    # sudo writes its command line to a log of the host.
    assert "example.com" not in setup.split("sudo")[1]
