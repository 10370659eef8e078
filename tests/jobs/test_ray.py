"""Jobs on the nodes of a real Ray, which runs on this machine while the tests do."""

from __future__ import annotations

import json
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import ray_cluster
import sshd
from launched import fault
from places import PYTHONPATH

from launcher.errors import UsageError
from launcher.jobs import ray_nodes
from launcher.jobs.transports import Host, Refusal
from launcher.machine.ports import free_ports

B, C = "127.0.0.3", "127.0.0.4"

# -------------------------------------------------------------------------------------------------------- without Ray


def test_a_worker_a_node():
    transport = ray_nodes.transport(2, "CPU=4,GPU=2")
    assert transport.hosts == (
        Host(name="ray node 0", address="<ray node 0>"),
        Host(name="ray node 1", address="<ray node 1>"),
    )
    argv = transport.argv(transport.hosts[1], ("env", "x"))
    assert argv[1:3] == ("-m", "launcher.jobs.ray_nodes") and argv[4:] == ("2", "CPU=4,GPU=2", "1", "env", "x")


@pytest.mark.parametrize("resources", ["", "CPU", "CPU=", "CPU=0", "CPU=1,", "=1", "CPU=1;GPU=1"])
def test_resources_that_are_none_are_refused(resources):
    with pytest.raises(UsageError, match=re.escape(f"--ray_resources={resources}: write NAME=NUMBER")):
        ray_nodes.transport(1, resources)


def test_what_the_driver_says_is_told_from_what_the_command_says():
    transport = ray_nodes.transport(1, "CPU=1")
    said = ["some warning of Ray", "ray: no Ray cluster"]
    assert transport.explain(transport.hosts[0], 64, said) == Refusal(message="no Ray cluster", is_mistake=True)
    assert not transport.explain(transport.hosts[0], 75, said).is_mistake
    assert transport.explain(transport.hosts[0], 127, ["env: no-python: No such file or directory"]) is None


@pytest.fixture
def without_ray(tmp_path):
    """Variables of a process that finds no Ray, whether there is one or not."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')")
    return {"PYTHONPATH": f"{tmp_path}/none:{PYTHONPATH}"}


def test_a_plan_needs_no_ray_and_a_job_says_how_to_install_it(launch, without_ray):
    planned = launch("--backend=ray", "--dry_run", env=without_ray).wait()
    assert planned.returncode == 0, planned.stderr
    assert "# worker 1 on ray node 1, log: " in planned.stdout
    job = launch("--backend=ray", env=without_ray)
    done = job.wait()
    assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr
    assert done.stderr.startswith("error: --backend=ray needs ray, which is not installed: ")
    assert "[ray]" in done.stderr and not job.model_dir.exists()


# --------------------------------------------------------------------------------------------------- with a real Ray

real = [pytest.mark.skipif(bool(ray_cluster.MISSING), reason=ray_cluster.MISSING or "there"), pytest.mark.slow]


@pytest.fixture(scope="module")
def running_ray():
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: a socket's path has a limit
    cluster = ray_cluster.RayCluster(folder, free_ports(1)[0])
    try:
        cluster.start(ray_cluster.HEAD)
        cluster.start(B)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def launch_on(request, launch, eventually):
    """launch_on(*flags, **settings): a job of two fake workers on the two nodes, which are free again at the end."""
    cluster = request.getfixturevalue("running_ray")

    def start(*flags, workers=2, **settings):
        env = {"RAY_ADDRESS": cluster.address}
        given = ("--backend=ray", "--env=FAKE_WORKER", "--env=TMPDIR", *flags)
        return launch(*given, workers=workers, hosts=True, env=env, show=["TF_CONFIG"], **settings)

    yield start
    eventually(lambda: cluster.free_cpus() == 2)


def what_is_left(job, tmp_path):
    return [*job.running(), *sshd.agents(tmp_path), *tmp_path.glob("launcher-*")]


def addresses(job, attempt=1):
    """Of the workers, as they know them of each other."""
    config = re.search(r"TF_CONFIG=(.*)", job.log(attempt, 0))[1]
    return [address.partition(":")[0] for address in json.loads(config)["cluster"]["worker"]]


def wait_for_training(job, workers, attempt=1):
    job.until(lambda: all("reading a batch" in job.log(attempt, rank) for rank in range(workers)))


def drivers(job):
    """The processes by which the supervisor reaches nodes, by rank."""
    children = psutil.Process(job.started.process.pid).children()
    found = [child for child in children if "launcher.jobs.ray_nodes" in child.cmdline()]
    return sorted(found, key=lambda child: child.cmdline()[6])


class TestWithRay:
    pytestmark = real

    def test_workers_on_two_nodes_reach_each_other_by_the_addresses_of_these(self, launch_on, eventually, tmp_path):
        job = launch_on()
        done = job.wait()
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        assert sorted(addresses(job)) == [ray_cluster.HEAD, B]
        assert "done" in job.log(1, 0) and "done" in job.log(1, 1)
        eventually(lambda: not what_is_left(job, tmp_path))

    def test_a_killed_worker_is_named_and_all_go_on_from_the_last_checkpoint(self, launch_on):
        job = launch_on(faults=[fault("send_self", number=int(signal.SIGKILL))], checkpoint=True)
        assert job.wait().returncode == 0
        assert job.error(attempt=1)["worker"] == 1 and "was killed by SIGKILL" in job.error(attempt=1)["what"]
        assert "training from step 2," in job.log(2, 0) and "training from step 2," in job.log(2, 1)

    def test_a_lost_driver_is_named_and_another_takes_its_place(self, launch_on, tmp_path, eventually):
        faults = [fault("read_next_batch", rank=rank) for rank in (0, 1)]
        job = launch_on(faults=faults, checkpoint=True)
        wait_for_training(job, 2)
        before = job.running()
        where = addresses(job)[0]
        drivers(job)[0].kill()
        done = job.wait()
        assert done.returncode == 0, done.stdout + done.stderr
        error = job.error(attempt=1)
        assert error["worker"] == 0
        assert error["what"].startswith(f"was lost: the connection to ray node {where} ended")
        assert len(before) == 2 and not set(before) & set(job.running())
        eventually(lambda: not what_is_left(job, tmp_path))

    def test_a_job_goes_on_on_the_node_that_ray_has_for_one_that_is_lost(self, launch_on, running_ray):
        job = launch_on(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)], checkpoint=True)
        wait_for_training(job, 2)
        lost = addresses(job).index(B)
        running_ray.stop(B)
        running_ray.start(C)
        try:
            done = job.wait()
            assert done.returncode == 0, done.stdout + done.stderr
            error = job.error(attempt=1)
            assert error["worker"] == lost
            assert error["what"].startswith(f"was lost: the connection to ray node {B} ended (ray: ")
            assert sorted(addresses(job, 2)) == [ray_cluster.HEAD, C]
        finally:
            running_ray.stop(C)
            running_ray.start(B)

    def test_a_job_goes_on_with_fewer_and_again_with_all_once_there_is_a_node(self, launch_on, running_ray):
        flags = ("--min_workers=1", "--connect_timeout=2")
        job = launch_on(*flags, steps=10**9, checkpoint=True, on_sigterm="save")
        job.until(lambda: "training from" in job.log(1, 0))
        running_ray.stop(B)
        try:
            job.until(lambda: "one of 1 for 2" in job.log(2, 0))
        finally:
            running_ray.start(B)
        job.until(lambda: all("training from" in job.log(3, rank) for rank in (0, 1)))
        job.started.send(signal.SIGTERM)
        assert job.wait().returncode == 42

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_nothing_survives_the_supervisor(self, launch_on, eventually, tmp_path, number):
        faults = [fault(do, rank=rank) for rank in (0, 1) for do in ("start_children", "read_next_batch")]
        job = launch_on("--grace_period=1", faults=faults)
        wait_for_training(job, 2)
        assert len(job.running()) == 6 and len(sshd.agents(tmp_path)) == 2
        job.started.process.send_signal(number)
        job.started.process.wait()
        eventually(lambda: not what_is_left(job, tmp_path))

    def test_a_stop_that_reaches_all_processes_of_the_job_as_ray_sends_it_lets_workers_save(self, launch_on):
        job = launch_on(on_sigterm="save", steps=10**9)
        job.until(lambda: job.log(1, 0) and job.log(1, 1))
        for process in [*drivers(job), psutil.Process(job.started.process.pid)]:
            process.terminate()
        done = job.wait()
        assert done.returncode == 42 and "saved at step" in done.stdout, done.stdout + done.stderr

    def test_more_workers_than_nodes_are_waited_for_with_what_there_is(self, launch_on):
        job = launch_on("--connect_timeout=1", workers=3)
        done = job.wait()
        said = "Ray has no 3 free nodes with CPU=1: 2 of its 2 nodes have that at all, and all together CPU=2"
        assert (done.returncode, done.stderr.count("\n")) == (75, 1)
        assert done.stderr.startswith(f"error: {said}") and not job.model_dir.exists()
        assert done.stdout.count("\n") == 1 and f"{said}; trying for 1 s" in done.stdout

    def test_a_cluster_that_is_not_there_is_a_mistake(self, launch):
        job = launch("--backend=ray", env={"RAY_ADDRESS": "127.0.0.9:1"})
        done = job.wait()
        assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr
        assert done.stderr.startswith("error: no Ray cluster (RAY_ADDRESS=127.0.0.9:1: ")
        assert "ray job submit" in done.stderr and not job.model_dir.exists()
