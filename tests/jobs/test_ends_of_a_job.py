"""How a job ends from outside: signals, deaths of the supervisor, folders and readers that go away."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from cases import repeated_but
from launched import LaunchedJob, fault
from places import ROOT

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]


# ------------------------------------------------------------------------------------------------------------ signals


def wait_for_training(job, workers=2):
    job.until(lambda: all("reading a batch" in job.log(1, rank) for rank in range(workers)))


HANGING = [fault("read_next_batch", rank=0), fault("read_next_batch", rank=1)]


@pytest.mark.parametrize("number", repeated_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_workers_that_do_not_handle_it_and_the_job_says_so(launch, number):
    job = launch(faults=HANGING)
    wait_for_training(job)
    job.started.process.send_signal(number)
    assert job.wait().returncode == 128 + number
    assert job.running() == []


@pytest.mark.parametrize(
    "number", repeated_but([signal.SIGUSR1, None], [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, None])
)
def test_workers_that_save_on_a_signal_or_when_the_time_is_up_end_the_job_with_42(launch, number):
    job = launch(*([] if number else ["--stop_after=3s"]), on_sigterm="save", steps=10**9)
    job.until(lambda: job.log(1, 0) and job.log(1, 1))
    if number:
        job.started.process.send_signal(number)
    finished = job.wait()
    assert finished.returncode == 42
    assert "saved at step" in finished.stdout
    assert job.attempts() == ["attempt_1"] and job.running() == []


def test_a_sigterm_that_reaches_every_process_of_the_job_saves(launch):
    job = launch(on_sigterm="save", steps=10**9)
    job.until(lambda: all("training from" in job.log(1, rank) for rank in (0, 1)))
    supervisor = psutil.Process(job.started.process.pid)
    for _ in range(2):
        for process in (supervisor, *supervisor.children(recursive=True)):
            process.send_signal(signal.SIGTERM)
    finished = job.wait()
    assert finished.returncode == 42, finished.stdout
    assert job.log(1, 0).count("finishing the step and saving") == 1
    assert job.running() == []


def test_workers_that_ignore_a_signal_are_killed_after_the_grace_period(launch):
    job = launch("--grace_period=0.2", faults=HANGING, on_sigterm="ignore")
    wait_for_training(job)
    job.started.process.send_signal(signal.SIGTERM)
    assert job.wait().returncode == 128 + signal.SIGTERM
    assert job.running() == []


def test_a_second_signal_does_not_wait(launch):
    job = launch("--grace_period=1e6", faults=HANGING, on_sigterm="ignore")
    wait_for_training(job)
    job.started.process.send_signal(signal.SIGTERM)

    def insist():
        job.started.process.send_signal(signal.SIGTERM)
        return job.started.process.poll() is not None

    job.until(insist)
    assert job.wait().returncode == 128 + signal.SIGTERM
    assert job.running() == []


def test_a_signal_while_waiting_to_restart_ends_the_job(launch):
    job = launch("--max_restarts=100", faults=[fault("leave", attempt=0, step=0, code=1)])
    job.until(lambda: "restarting all workers in" in job.started.stdout)  # the second time: the first is at once
    job.started.process.send_signal(signal.SIGTERM)
    assert job.wait().returncode == 42  # the last state is saved as for any preemption


# Python says what it has imported, the supervisor what it starts: each is another moment.
MOMENTS = ["launcher.modes", "drill.rehearsal", "launcher.jobs.supervisor", "starting 2 worker"]


@pytest.mark.parametrize("moment", repeated_but([MOMENTS[0], MOMENTS[3]], MOMENTS))
def test_a_sigterm_while_the_job_starts_ends_it_with_42(fake_environment, tmp_path, ended, moment):
    flags = ["--workers=2", "--worker_module=fake_worker", "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "launcher.launch", *flags],
        env={**os.environ, **fake_environment(steps=10**9, on_sigterm="save")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ended.append(process)
    assert any(moment in line for line in process.stdout)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 42, said
    assert LaunchedJob(None, tmp_path / "run").running() == []


def test_a_worker_that_a_sigterm_ends_while_it_starts_is_not_waited_for_by_the_others(launch):
    job = launch("--grace_period=1e6", on_sigterm="save", faults=[fault("start_slowly", rank=0, step="start")])
    job.until(lambda: "starting slowly" in job.log(1, 0) and len(job.running()) == 2)
    job.started.process.send_signal(signal.SIGTERM)
    assert job.wait().returncode == 42
    assert job.running() == []


def test_children_of_workers_end_with_the_job_also_those_that_left_their_group(run_job):
    children = [fault("start_children", rank=rank) for rank in (0, 1)]
    job, finished = run_job(faults=[*children, fault("send_self", number=int(signal.SIGKILL), step=3)])
    assert finished.returncode == 0
    assert len(job.numbers("children")) == 4 * 2 - 4  # of the first attempt; run_job has seen that they are gone


def test_nothing_survives_the_supervisor_when_it_is_killed(launch, eventually, tmp_path):
    job = launch(faults=[*(fault("start_children", rank=rank, step=1) for rank in (0, 1)), *HANGING])
    wait_for_training(job)
    assert len(job.running()) == 6
    job.started.process.kill()
    job.started.process.wait()
    eventually(lambda: not job.running() and not list(tmp_path.glob("launcher-*")))


def guard_of(job):
    found = []
    for one in psutil.Process(job.started.process.pid).children():
        with contextlib.suppress(psutil.Error):  # others come and go
            found += [one] * ("launcher.jobs.guard" in " ".join(one.cmdline()))
    return found


def test_a_guard_that_is_killed_has_a_successor(launch, eventually):
    job = launch(faults=[fault("start_children", step=1), *HANGING])
    wait_for_training(job)
    (first,) = guard_of(job)
    first.kill()
    eventually(lambda: [guard for guard in guard_of(job) if guard != first])
    eventually(lambda: "another one has taken its place" in job.started.stdout)
    job.started.process.kill()
    eventually(lambda: not job.running())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG")
def test_workers_end_when_supervisor_and_guard_are_killed_in_one_moment(launch, eventually):
    job = launch(faults=HANGING)
    wait_for_training(job)
    for process in (*guard_of(job), psutil.Process(job.started.process.pid)):
        process.kill()
    eventually(lambda: not job.running())


@pytest.fixture
def ended():
    """A list of processes, of which none is left at the end."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_an_interpreter_that_is_gone_at_a_restart_is_one_message(fake_environment, tmp_path, eventually, ended):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    environ = fake_environment(faults=HANGING)
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], *filter(None, sys.path)])
    flags = ["--workers=2", "--worker_module=fake_worker", "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [tmp_path / "venv" / "bin" / "python", "-m", "launcher.launch", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}, cwd=tmp_path,
    )  # fmt: skip
    ended.append(process)
    log = tmp_path / "run" / "logs" / "attempt_1" / "worker_1.log"
    eventually(lambda: log.exists() and "reading a batch" in log.read_text())
    shutil.rmtree(tmp_path / "venv")
    os.kill(int((tmp_path / "run" / "pids").read_text().split()[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert said.startswith(f"error: {tmp_path}/venv/bin/python cannot be run: No such file or directory; ")
    assert said.count("\n") == 1


@pytest.fixture
def make_read_only():
    """make_read_only(folder): nothing can be written there from now on, for root neither."""
    changed = []

    def change(folder):
        changed.append(folder)
        if os.geteuid():
            folder.chmod(0o555)
        elif subprocess.run(["mount", "--bind", folder, folder], check=False).returncode:
            pytest.skip("root who may not mount")
        else:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

    yield change
    for folder in changed:
        if os.geteuid():
            folder.chmod(0o755)
        else:
            subprocess.run(["umount", folder], check=False)


def test_a_folder_that_became_read_only_is_one_message(run_job, launch, make_read_only):
    job, _ = run_job(checkpoint=True)
    make_read_only(job.model_dir)
    finished = launch(checkpoint=True).wait()
    assert finished.returncode == 75
    assert finished.stderr.startswith(f"error: --model_dir={job.model_dir} cannot be written to any more: ")
    assert finished.stderr.count("\n") == 1


def test_a_folder_that_became_read_only_before_a_restart_is_one_message(launch, make_read_only):
    job = launch(faults=HANGING)
    wait_for_training(job)
    make_read_only(job.model_dir)
    os.kill(job.numbers("pids")[0], signal.SIGKILL)
    finished = job.wait()
    assert finished.returncode == 75
    assert finished.stderr.startswith(f"error: --model_dir={job.model_dir} cannot be written to any more: ")
    assert finished.stderr.count("\n") == 1


def start_with_stdout(stdout, fake_environment, tmp_path):
    """Two workers that print more than any buffer takes and then train until they are told to stop."""
    flags = ["--workers=2", "--worker_module=fake_worker", "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}"]
    settings = {"on_sigterm": "save", "steps": 10**9, "faults": [fault("print_much", rank=rank) for rank in (0, 1)]}
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.launch", *flags],
        stdout=stdout, stderr=subprocess.PIPE, text=True, env={**os.environ, **fake_environment(**settings)},
        cwd=tmp_path,
    )  # fmt: skip


def logs_are_written(tmp_path):
    logs = [tmp_path / "run" / "logs" / "attempt_1" / f"worker_{rank}.log" for rank in (0, 1)]
    return all(log.exists() and log.stat().st_size > 40 * 100_000 for log in logs)


def test_an_output_that_nobody_reads_stops_nothing(fake_environment, tmp_path, eventually, ended):
    source, target = os.pipe()
    process = start_with_stdout(target, fake_environment, tmp_path)
    ended.append(process)
    os.close(target)
    eventually(lambda: logs_are_written(tmp_path))
    process.terminate()
    _, said = process.communicate(timeout=60)
    os.close(source)
    assert process.returncode == 42
    assert said.startswith("[launcher] nobody read ")


def test_an_output_that_does_not_wait_gets_every_line(fake_environment, tmp_path, eventually, ended):
    source, target = os.pipe()
    os.set_blocking(target, False)
    process = start_with_stdout(target, fake_environment, tmp_path)
    ended.append(process)
    os.close(target)
    with open(source, "rb") as file:
        reader = concurrent.futures.ThreadPoolExecutor(1)
        read = reader.submit(file.read)
        eventually(lambda: logs_are_written(tmp_path))
        process.terminate()
        _, said = process.communicate(timeout=60)
        lines = read.result().splitlines()
        reader.shutdown()
    assert (process.returncode, said) == (42, "")
    assert sum(len(line) > 100_000 - 65536 for line in lines) >= 80
    assert lines[-1].endswith(b"exit code 42")


def test_a_reader_of_the_output_that_goes_away_does_not_end_the_job(fake_environment, tmp_path):
    flags = ["--workers=2", "--worker_module=fake_worker", "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.launch", *flags],
        stdout=subprocess.PIPE,
        env={**os.environ, **fake_environment()},
        cwd=tmp_path,
    )
    process.stdout.close()
    assert process.wait(60) == 0
    assert (tmp_path / "run" / "logs" / "attempt_1" / "worker_1.log").read_text().endswith("done\n")


REPEATS = """
import os, signal, sys
from launcher.worker import preemption
stop = preemption.StopRequest()
with stop.installed():
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(42 if stop() else 1)
"""


def test_without_a_supervisor_repeats_within_seconds_are_one_request():
    assert subprocess.run([sys.executable, "-c", REPEATS], check=False).returncode == 42


def test_a_program_without_standard_streams_or_working_directory_runs_or_says_so(tmp_path):
    then = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    code = f"os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); {then}"
    launch = ["-m", "launcher.launch", "--version"]
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, *launch]
    assert subprocess.run(closed, cwd=ROOT, check=False).returncode == 0
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import os, sys; {code}", *launch]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (64, 1) and "working directory" in ended.stderr


NOTICED = """
import os, signal, sys, time
from launcher.worker import preemption
signals, stop_after, job_seconds, number = sys.argv[1:]
if job_seconds:
    os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + int(job_seconds))
preemption.configure(signals, stop_after)
stop = preemption.StopRequest()
with preemption.before_training(), stop.installed():
    number and os.kill(os.getpid(), int(number))
    while not stop():
        pass
"""


@pytest.mark.parametrize(
    ("given", "said", "code"),
    [
        (("USR1,XCPU", "", "", "24"), "SIGXCPU: finishing the step and saving\n", 0),
        (("USR1", "", "", "24"), "", -signal.SIGXCPU),
        (("", "1s", "3000", ""), "the time is up: finishing the step and saving\n", 0),
        (("", "", "2", ""), "the time is up: finishing the step and saving\n", 0),
    ],
)
def test_without_a_supervisor_warnings_and_the_end_of_the_time_ask_to_save(given, said, code):
    ended = subprocess.run([sys.executable, "-c", NOTICED, *given], capture_output=True, text=True, check=False)
    assert (ended.stderr, ended.returncode) == (said, code)


@pytest.mark.parametrize("module", ["main", "launch"])
def test_a_program_hears_sigterm_before_its_imports(module, tmp_path):
    # As process 1 of a container, which hears only what it handles; absl is among what is imported first.
    (tmp_path / "absl.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"launcher.{module}"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, check=False).returncode == 42


REPEAT_AT_THE_END = """
import os, signal, sys
from launcher.worker import preemption
hand_back = signal.set_wakeup_fd
def repeat_and_hand_back(*arguments, **options):
    before = hand_back(*arguments, **options)
    if stop():
        os.kill(os.getpid(), signal.SIGTERM)
    return before
stop = preemption.StopRequest()
with preemption.before_training():
    with stop.installed():
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop():
            pass
        signal.set_wakeup_fd = repeat_and_hand_back
print("saved")
"""


def test_a_repeat_that_comes_as_the_request_has_been_answered_is_no_request_to_what_comes_before_training():
    ended = subprocess.run([sys.executable, "-c", REPEAT_AT_THE_END], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "saved\n")
    assert "nothing to save" not in ended.stderr
