"""Jobs of fake workers under a real supervisor: `python -m launcher.launch` with processes, signals and files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import psutil
import pytest
import sshd
from launched import LaunchedJob
from places import PYTHONPATH
from ssh_jobs import assert_nothing_left


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    return _eventually


def _eventually(condition: Callable[[], object]) -> None:
    """Waits for a condition; fails the test after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("condition not met after 60 s")
        time.sleep(0.02)


@pytest.fixture
def fake_environment(tmp_path):
    """fake_environment(**settings): variables that make fake_worker.py importable and tell it what to do."""

    def make(**settings) -> dict[str, str]:
        return {
            "FAKE_WORKER": json.dumps(settings),
            "PYTHONPATH": PYTHONPATH,
            "TMPDIR": str(tmp_path),
        }

    return make


@pytest.fixture
def launch(start_launcher, fake_environment, tmp_path):
    """launch(*flags, workers=2, faults=(), env={}, **settings): starts a job of fake workers; see fake_worker.py."""

    def start(*flags: str, workers: int = 2, faults=(), model_dir: str = "run", env=(), **settings) -> LaunchedJob:
        given = (f"--workers={workers}", "--worker_module=fake_worker", "--gin_file=fake.gin", *flags)
        folder = tmp_path / model_dir
        return LaunchedJob(
            start_launcher(
                *given,
                f"--model_dir={folder}",
                module="launcher.launch",
                env={**fake_environment(**settings, faults=list(faults)), **dict(env)},
            ),
            folder,
        )

    jobs: list[LaunchedJob] = []

    def remembered(*flags: str, **options) -> LaunchedJob:
        jobs.append(start(*flags, **options))
        return jobs[-1]

    yield remembered
    for job in jobs:
        job.started.end()
        for number in job.running():
            psutil.Process(number).kill()


@pytest.fixture
def run_job(launch):
    """The same, run to its end, at which nothing may be left: no worker, no child, no temporary folder.

    Returns the job and how its supervisor ended.
    """

    def run(*flags: str, **options):
        job = launch(*flags, **options)
        finished = job.wait()
        assert job.running() == []
        assert list(job.model_dir.parent.glob("launcher-*")) == []
        return job, finished

    return run


@pytest.fixture
def hosts(tmp_path, free_ports):
    """hosts(*addresses, settings=""): starts an sshd at each; all are gone at the end, and the agents they started."""
    made = []

    def bring_up(*addresses, settings=""):
        made.append(sshd.SshHosts(tmp_path / f"ssh{len(made)}", free_ports(1)[0], settings))
        made[-1].start(*addresses)
        return made[-1]

    yield bring_up
    for one in made:
        one.close()
    for agent in sshd.agents(tmp_path):
        agent.kill()


@pytest.fixture(params=["ssh"])
def launch_on(request, launch, hosts):
    """launch_on(addresses, *flags, workers=None, servers=None, **settings): a job of fake workers on these hosts."""

    def start(addresses, *flags, servers=None, workers=None, **settings):
        servers = servers or hosts(*addresses)
        given = (f"--backend={request.param}", f"--hosts={','.join(addresses)}", "--env=FAKE_WORKER", "--env=TMPDIR")
        command = {
            "ssh": f"--ssh_command={servers.command()}",
            "exec": f"--command={servers.command()} {{host}} {{command}}",
        }[request.param]
        number = workers or len(addresses)
        return launch(*given, command, *flags, workers=number, hosts=True, **settings), servers

    return start


@pytest.fixture
def run_on(launch_on, tmp_path):
    """The same, run to its end, at which nothing may be left on any host."""

    def run(*args, **options):
        job, _ = launch_on(*args, **options)
        finished = job.wait()
        assert_nothing_left(job, tmp_path)
        return job, finished

    return run
