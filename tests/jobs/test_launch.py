"""What the supervisor does about each way in which workers end, with real processes and signals."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups and signals")


def fault(do, *, rank=1, attempt=1, step=2, **arguments):
    return {"rank": rank, "attempt": attempt, "step": step, "do": do, **arguments}


def summary_line(finished):
    return [line for line in finished.stdout.splitlines() if line.startswith("[launcher] job ")][-1]


def test_a_job_that_nothing_disturbs_is_done_in_one_attempt(run_job):
    job, finished = run_job("--gin_param", "train.steps = 4", workers=3)
    assert finished.returncode == 0, finished.stdout
    assert summary_line(finished) == "[launcher] job done: 1 attempt(s), 0 restart(s), exit code 0"
    assert finished.stderr == ""
    assert not (job.model_dir / "error.json").exists()


def test_output_goes_to_the_console_with_a_prefix_and_to_a_log_of_each_worker(run_job):
    job, finished = run_job("--gin_param", "train.steps = 4")
    for rank in (0, 1):
        log = job.log(1, rank).splitlines()
        assert log[0].startswith("training from step 0, --gin_file=fake.gin --gin_param train.steps = 4 --model_dir=")
        assert [line for line in finished.stdout.splitlines() if line.startswith(f"[worker {rank}] ")] == [
            f"[worker {rank}] {line}" for line in log
        ]


@pytest.mark.parametrize("code", [64, 70])
def test_an_error_that_a_retry_will_not_help_ends_the_job_with_its_code(run_job, code):
    _, finished = run_job(faults=[fault("raise_error", kind="TheirError", message="no such thing", code=code)])
    assert finished.returncode == code
    assert summary_line(finished).endswith(f"1 attempt(s), 0 restart(s), exit code {code}")
    assert f"worker 1 ended with exit code {code}: TheirError: no such thing" in finished.stderr


def test_the_report_of_an_error_that_says_what_to_do_has_no_traceback(run_job):
    said = "nothing listens at the address of worker 1"
    raised = fault("raise_error", rank=0, kind="PeerError", message=said, code=75)
    job, finished = run_job("--max_restarts=0", workers=1, faults=[raised])
    assert finished.returncode == 75
    assert f": PeerError: {said}\n" in finished.stderr
    assert "traceback" not in finished.stderr
    assert json.loads((job.model_dir / "error.json").read_text())["error"]["traceback"] == ""


def test_a_mistake_in_the_flags_leaves_nothing_behind(run_job):
    job, finished = run_job(faults=[fault("leave", rank=0, step="start", code=64), fault("leave", step=0, code=64)])
    assert finished.returncode == 64
    assert not (job.model_dir / "logs").exists() and not (job.model_dir / "error.json").exists()


def test_a_second_job_in_the_same_folder_is_refused_before_it_writes_anything(launch):
    first = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    first.until(lambda: all("reading a batch" in first.log(1, rank) for rank in (0, 1)))
    before = sorted(first.model_dir.rglob("*"))
    second = launch()
    finished = second.wait()
    assert finished.returncode == 64
    assert finished.stdout == ""
    assert finished.stderr.startswith(f"error: --model_dir={first.model_dir}: another run writes to it: supervisor ")
    assert f"supervisor {first.started.process.pid} on " in finished.stderr
    assert sorted(first.model_dir.rglob("*")) == before
    first.started.process.send_signal(signal.SIGTERM)
    first.wait()
    assert not (first.model_dir / "lease.json").exists()


def test_a_job_whose_supervisor_was_killed_is_taken_over(launch):
    first = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    first.until(lambda: all("reading a batch" in first.log(1, rank) for rank in (0, 1)))
    first.started.process.kill()
    first.started.process.wait()
    finished = launch().wait()
    assert finished.returncode == 0
    assert f"/lease.json from supervisor {first.started.process.pid} on " in finished.stdout


def test_a_job_whose_folder_another_run_has_taken_over_stops_and_writes_nothing(launch):
    job = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    job.until(lambda: all("reading a batch" in job.log(1, rank) for rank in (0, 1)))
    path = job.model_dir / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "job": "another", "host": "elsewhere", "boot": "-"}))
    finished = job.wait()
    assert finished.returncode == 70
    assert "lease.json was taken over by supervisor " in finished.stderr and "on elsewhere since" in finished.stderr
    assert job.running() == []
    assert not (job.model_dir / "error.json").exists() and not (job.model_dir / "summary.json").exists()
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_a_temporary_folder_that_is_full_silences_nobody(launch, small_disk):
    """It fills up in the first attempt, and the second finds it full; both are heard."""
    faults = [
        fault("exit_when_sent", rank=1, step=2, name="filled", code=75),
        fault("read_next_batch", rank=1, attempt=2, step=5),
    ]
    flags = ("--start_timeout=60", "--stall_timeout=5")
    job = launch(*flags, faults=faults, checkpoint=True, steps=8, hosts=True, env={"TMPDIR": str(small_disk)})
    job.until(lambda: (job.model_dir / "checkpoints/step_00000002").exists())
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    (job.model_dir / "filled").touch()
    assert job.wait().returncode == 0
    assert job.error(2)["what"].startswith("is stuck: no progress for ")
    assert "at step 5" in job.error(2)["what"] and "read_next_batch" in job.error(2)["what"]


def test_a_temporary_folder_without_room_is_named(launch, small_disk):
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    (small_disk / "filler").open("r+b").truncate((8 << 20) - 16384)  # room enough for Python to choose the folder
    job = launch(env={"TMPDIR": str(small_disk)})
    finished = job.wait()
    assert finished.returncode == 75
    assert f"error: the temporary folder {small_disk} cannot take what the workers report: No space" in finished.stderr
    assert not job.model_dir.exists()
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_failed_job_whose_chief_could_not_say_so_has_a_summary(run_job):
    job, _ = run_job(faults=[fault("raise_error", kind="TheirError", message="no such thing", code=70)])
    summary = json.loads((job.model_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("failed", 70, 2)
    assert "worker 1" in summary["error"] and "TheirError: no such thing" in summary["error"]


def test_a_preempted_job_is_not_restarted(run_job):
    job, finished = run_job(faults=[fault("leave", rank=rank, code=42) for rank in (0, 1)])
    assert finished.returncode == 42
    assert job.attempts() == ["attempt_1"]


BARE_EXIT = fault("leave", code=1)


@pytest.mark.parametrize(
    "how",
    [
        fault("send_self", number=int(signal.SIGKILL)),
        fault("send_self", rank=0, number=int(signal.SIGTERM)),
        BARE_EXIT,
        fault("raise_error", kind="CheckpointWriteError", message="disk full", code=75),
    ],
    ids=["SIGKILL", "SIGTERM of the chief", "exit 1", "disk full: exit 75"],
)
def test_a_failure_that_may_pass_restarts_all_workers_from_the_last_checkpoint(run_job, how):
    job, finished = run_job(faults=[how], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert summary_line(finished) == "[launcher] job done: 2 attempt(s), 1 restart(s), exit code 0"
    for rank in (0, 1):
        assert job.log(1, rank).startswith("training from step 0,")
        assert job.log(2, rank).startswith("training from step 2,")
    if how != BARE_EXIT:  # which victims have, too, and nobody can tell them apart when they end in one moment
        assert job.error(attempt=1)["worker"] == how["rank"]
    assert not (job.model_dir / "error.json").exists()


def test_gives_up_after_restarts_without_progress(run_job):
    job, finished = run_job("--max_restarts=1", faults=[fault("leave", attempt=0, code=1)], checkpoint=True)
    assert finished.returncode == 75
    # One that reaches step 2, one that gets no further.
    assert job.attempts() == ["attempt_1", "attempt_2"]
    assert job.error()["job_exit_code"] == 75
    assert finished.stderr.splitlines()[-1].startswith("Gave up: --max_restarts=1 ")


def test_progress_starts_the_count_of_restarts_over(run_job):
    faults = [fault("leave", attempt=attempt, step=attempt, code=1) for attempt in (1, 2, 3)]
    job, finished = run_job("--max_restarts=1", faults=faults, checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert len(job.attempts()) == 4


def test_without_checkpoints_the_step_that_workers_reach_is_progress(run_job):
    faults = [fault("leave", attempt=attempt, step=step, code=1) for attempt, step in ((1, 1), (2, 2), (3, 2))]
    job, finished = run_job("--max_restarts=1", faults=faults)
    assert finished.returncode == 75
    assert len(job.attempts()) == 3


def test_no_restart_when_none_is_allowed(run_job):
    job, finished = run_job("--max_restarts=0", faults=[fault("leave", code=1)])
    assert finished.returncode == 75 and job.attempts() == ["attempt_1"]


def test_the_same_command_again_keeps_the_earlier_logs(run_job):
    job, _ = run_job("--max_restarts=0", faults=[fault("leave", code=1)], checkpoint=True)
    before = job.log(1, 0)
    job, finished = run_job(checkpoint=True)
    assert finished.returncode == 0
    assert job.log(1, 0) == before and job.log(2, 0).startswith("training from step 2,")


# -------------------------------------------------------------------------------------------------------- first error


def test_the_first_error_is_named_although_its_victims_end_before_it(run_job):
    raised = fault("raise_error", rank=2, kind="ValueError", message="bad label 12", code=70, after_peers=True)
    job, finished = run_job(workers=3, faults=[raised])
    assert finished.returncode == 70
    error = job.error()
    assert (error["worker"], error["exit_code"], error["job_exit_code"]) == (2, 70, 70)
    assert (error["error"]["type"], error["error"]["message"]) == ("ValueError", "bad label 12")
    assert [victim["worker"] for victim in error["victims"]] == [0, 1]
    assert all(victim["what"] == "ended with exit code 1" for victim in error["victims"])
    report = finished.stderr
    assert report.startswith("First error (attempt 1): worker 2 ended with exit code 70: ValueError: bad label 12\n")
    assert "{}))(message)" in report  # its traceback
    assert "Victims of it, not causes: worker 0 ended with exit code 1; worker 1 ended with exit code 1" in report


def test_a_death_is_found_behind_the_victims_that_were_seen_first(run_job):
    job, finished = run_job(workers=3, faults=[fault("segfault_after_peers", rank=1)], checkpoint=True)
    assert finished.returncode == 0
    assert job.error(attempt=1)["worker"] == 1
    assert job.error(attempt=1)["what"] == "was killed by SIGSEGV"


def test_a_frozen_worker_is_named_when_its_peers_leave(run_job, tmp_path):
    faults = [fault("send_self", number=int(signal.SIGSTOP)), fault("exit_when_sent", rank=0, name="go")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "go").touch()
    job, finished = run_job(faults=[*faults, fault("leave", rank=1, attempt=2, code=70)], checkpoint=True)
    assert finished.returncode == 70
    assert job.error(attempt=1)["worker"] == 1
    assert "frozen" in job.error(attempt=1)["what"]


def test_an_error_without_a_record_is_shown_by_the_last_lines_of_the_log(run_job):
    job, finished = run_job("--max_restarts=0", workers=1, faults=[fault("leave", rank=0, code=3)])
    assert job.error()["last_lines"][-1] == "leaving with 3"
    assert "  | leaving with 3" in finished.stderr


# ------------------------------------------------------------------------------------------------------------- stalls


def test_a_stuck_worker_is_named_with_its_python_stack_in_the_log_and_the_job_goes_on(run_job):
    job, finished = run_job("--stall_timeout=3", workers=3, faults=[fault("read_next_batch")], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    error = job.error(attempt=1)
    assert error["worker"] == 1
    assert error["what"].startswith("is stuck: no progress for ") and "at step 2" in error["what"]
    assert "in read_next_batch" in job.log(1, 1)
    for rank in (0, 2):
        assert "in quick_execute" in job.log(1, rank)  # every worker's stack is there, and tells a victim
    assert [victim["worker"] for victim in error["victims"]] == [0, 2]


def test_a_worker_that_never_starts_is_named(run_job):
    never = fault("read_next_batch", attempt=0, step="start")
    job, finished = run_job("--start_timeout=1", "--max_restarts=0", faults=[never])
    assert finished.returncode == 75
    assert job.error()["worker"] == 1
    assert job.error()["what"].startswith("did not start: no report within ")


# ------------------------------------------------------------------------------------------------------------ signals


def wait_for_training(job, workers=2):
    job.until(lambda: all("reading a batch" in job.log(1, rank) for rank in range(workers)))


HANGING = [fault("read_next_batch", rank=0), fault("read_next_batch", rank=1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_workers_that_do_not_handle_it_and_the_job_says_so(launch, number):
    job = launch(faults=HANGING)
    wait_for_training(job)
    job.started.process.send_signal(number)
    assert job.wait().returncode == 128 + number
    assert job.running() == []


def test_workers_that_save_on_a_signal_end_the_job_with_42(launch):
    job = launch(on_sigterm="save", steps=10**9)
    job.until(lambda: job.log(1, 0) and job.log(1, 1))
    job.started.process.send_signal(signal.SIGTERM)
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
    job.until(lambda: "restarting all workers in" in job.started.stdout)
    job.started.process.send_signal(signal.SIGTERM)
    assert job.wait().returncode == 128 + signal.SIGTERM


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
from launcher.supervised import preemption
stop = preemption.StopRequest()
with stop.installed():
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(42 if stop() else 1)
"""


def test_without_a_supervisor_repeats_within_seconds_are_one_request():
    assert subprocess.run([sys.executable, "-c", REPEATS], check=False).returncode == 42
