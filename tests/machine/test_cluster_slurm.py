import itertools
import stat

import hypothesis
import hypothesis.strategies as st
import pytest

from launcher.errors import UsageError
from launcher.machine import cluster
from launcher.machine.cluster import slurm

# What Slurm 22.05 sets for task 1 of `srun -n3` on one node, less what no one could take for a place.
REAL_STEP = {
    "SLURMD_NODENAME": "vm",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_JOBID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "vm",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_TASKS_PER_NODE": "3",
}
# What the shell of a batch script has, for `sbatch -N1 --exclusive`: tasks per node are the node's CPUs.
REAL_BATCH = {
    "SLURMD_NODENAME": "vm",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "vm",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}


def changed(environ, **changes):
    """The environment with some variables set, or removed where None."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def refusal(environ):
    with pytest.raises(UsageError) as caught:
        cluster.resolve(environ)
    return str(caught.value)


def compressed(counts):
    """As Slurm writes tasks per node: 2(x3),1."""
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def placed(counts, turn):
    """Node and local number of every task: nodes in a ring take `turn` tasks each until they are full."""
    left, places, node = list(counts), [], 0
    while any(left):
        for _ in range(min(turn, left[node])):
            places.append((node, counts[node] - left[node]))
            left[node] -= 1
        node = (node + 1) % len(counts)
    return places


def step(hosts, counts, *, nodelist=None, turn=None, job=1, number=0, distribution=None, **more):
    """The environments of all tasks of a job step."""
    distribution = {} if distribution is None else {"SLURM_DISTRIBUTION": distribution}
    return [
        {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_ID": str(number),
            "SLURM_STEP_NODELIST": nodelist or ",".join(hosts),
            "SLURM_STEP_NUM_TASKS": str(sum(counts)),
            "SLURM_STEP_TASKS_PER_NODE": compressed(counts),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURMD_NODENAME": hosts[node],
            **distribution,
            **more,
        }
        for rank, (node, local) in enumerate(placed(counts, turn or max(counts)))
    ]


# ------------------------------------------------------------------------------------------------------- in a job step


def test_the_variables_of_a_real_step_make_a_cluster():
    found = cluster.resolve(REAL_STEP)
    assert found == cluster.Cluster(source="slurm", workers=("vm:20064", "vm:20065", "vm:20066"), index=1)
    assert found.description == "worker 1 of 3 (vm:20065), from slurm"
    assert "srun --ntasks=1" in found.to_train_alone


def test_hosts_come_in_the_order_of_numbers_and_not_of_letters():
    (first, *_) = step(["n9", "n10", "n12", "gpu-01-ib"], [1, 1, 1, 1], nodelist="n[9-10,12],gpu-[01]-ib")
    hosts = [worker.rpartition(":")[0] for worker in cluster.resolve(first).workers]
    assert hosts == ["n9", "n10", "n12", "gpu-01-ib"]


_JOBS = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from(["block", "cyclic", "plane", "block:cyclic", "Cyclic:Block,Pack", "*", None]),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 1000),
)


@hypothesis.given(_JOBS)
def test_all_tasks_of_a_step_derive_the_same_workers_and_each_a_rank_of_its_own(case):
    counts, distribution, plane, job, number = case
    hosts = [f"node{index}" for index in range(8, 8 + len(counts))]
    nodelist = f"node[8-{7 + len(counts)}]"
    kind = (distribution or "").lower().split(":")[0]
    turn = {"cyclic": 1, "plane": plane}.get(kind)
    more = {"SLURM_DIST_PLANESIZE": str(plane)} if kind == "plane" else {}
    environments = step(
        hosts, counts, nodelist=nodelist, turn=turn, job=job, number=number, distribution=distribution, **more
    )
    found = [cluster.resolve(environ) for environ in environments]
    assert {place.workers for place in found} == {found[0].workers}
    assert [place.index for place in found] == list(range(sum(counts)))
    assert len(set(found[0].workers)) == sum(counts) == found[0].num_workers
    for place, environ in zip(found, environments, strict=True):
        host, _, port = place.workers[place.index].partition(":")
        assert host == environ["SLURMD_NODENAME"]
        assert 20000 <= int(port) < 20000 + slurm.NUM_PORTS < 32768


def ports(**arguments):
    (environ, *_) = step(["n1"], [8], **arguments)
    return {int(worker.rpartition(":")[2]) for worker in cluster.resolve(environ).workers}


def test_jobs_that_share_a_node_get_ports_of_their_own():
    taken = [ports(job=job) for job in range(70000, 70000 + slurm.NUM_SLOTS)]
    assert len(set().union(*taken)) == 8 * slurm.NUM_SLOTS


def test_steps_of_one_job_and_of_the_next_jobs_get_ports_of_their_own():
    taken = [ports(job=job, number=number) for job in range(500, 510) for number in range(8)]
    assert len(set().union(*taken)) == 8 * len(taken)


def test_the_range_of_ports_can_be_moved():
    assert {port + 10000 for port in ports()} == ports(LAUNCHER_PORT_BASE="30000")


def test_more_tasks_on_a_node_than_a_slot_has_ports_still_get_one_each():
    (environ, *_) = step(["n1"], [500], job=slurm.NUM_SLOTS - 1)  # the last slot, so ports go round
    workers = cluster.resolve(environ).workers
    assert len(set(workers)) == 500
    assert all(20000 <= int(worker.rpartition(":")[2]) < 20000 + slurm.NUM_PORTS for worker in workers)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x' is not a whole number"),
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID is missing or empty: srun sets it"),
        ({"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID='12_3' is not a whole number"),
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_STEP_NUM_TASKS is missing or empty: srun sets it"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "SLURM_STEP_NUM_TASKS='0' is not a whole number of 1 or more"),
        ({"SLURM_STEP_NUM_TASKS": "٣"}, "SLURM_STEP_NUM_TASKS='٣' is not a whole number"),
        ({"SLURM_PROCID": None}, "SLURM_PROCID is missing or empty"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID='3' is not a whole number from 0 to 2"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1' is not a whole number from 0 to 2"),
        ({"SLURM_STEP_NODELIST": " "}, "SLURM_STEP_NODELIST is missing or empty"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "SLURM_STEP_NODELIST='n[1': 'n[1' is not a host name"),
        ({"SLURM_STEP_NODELIST": "n[0-999999999]"}, "more than 65536 hosts"),
        ({"SLURM_STEP_NODELIST": "vm,vm"}, "names a node twice"),
        ({"SLURM_STEP_NODELIST": ","}, "names no node"),
        ({"SLURM_STEP_NODELIST": "vm,wm"}, "SLURM_STEP_TASKS_PER_NODE='3' is for 1 node(s)"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, "SLURM_STEP_TASKS_PER_NODE is missing or empty"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x999999)"}, "is for 999999 node(s), but SLURM_STEP_NODELIST='vm' names 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x0),3"}, "is not a list of counts such as 2(x3),1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0"}, "is not a list of counts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,"}, "is not a list of counts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(2)"}, "is not a list of counts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "makes 2 tasks, but SLURM_STEP_NUM_TASKS=3: a step over several"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID='2', but by SLURM_STEP_NODELIST"),
        ({"SLURMD_NODENAME": "other"}, "task SLURM_PROCID=1 would have 'vm': use srun --distribution=block"),
        ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "0"}, "SLURM_DIST_PLANESIZE='0'"),
        ({"LAUNCHER_PORT_BASE": "80"}, "LAUNCHER_PORT_BASE='80' is not a whole number from 1024 to 55488"),
        ({"LAUNCHER_PORT_BASE": "60000"}, "LAUNCHER_PORT_BASE='60000'"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changes, says):
    assert says in refusal(changed(REAL_STEP, **changes))


def test_more_tasks_on_a_node_than_there_are_ports_are_refused():
    count = str(slurm.NUM_PORTS + 1)
    environ = changed(REAL_STEP, SLURM_STEP_NUM_TASKS=count, SLURM_STEP_TASKS_PER_NODE=count)
    assert f"there are {slurm.NUM_PORTS} ports" in refusal(environ)


def test_an_order_that_cannot_be_known_is_refused_over_several_nodes_only():
    environments = step(["n1", "n2"], [1, 1], distribution="arbitrary")
    assert all("use srun --distribution=block" in refusal(environ) for environ in environments)
    assert cluster.resolve({**REAL_STEP, "SLURM_DISTRIBUTION": "arbitrary"}).index == 1


def test_a_task_that_is_not_where_the_order_says_is_refused():
    cyclic = step(["n1", "n2"], [2, 2], turn=1)  # and no word of it in SLURM_DISTRIBUTION
    assert "SLURMD_NODENAME='n2'" in refusal(cyclic[1])


# ------------------------------------------------------------------------------------------------------ outside of srun


@pytest.mark.parametrize(
    "environ",
    [
        REAL_BATCH,
        changed(REAL_BATCH, SLURM_NTASKS="1"),
        changed(REAL_BATCH, SLURM_NTASKS=""),
        {"SLURM_JOB_ID": "7"},
        {"SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4"},  # options for srun, and no job
        changed(REAL_BATCH, SLURM_STEP_ID="4294967290"),  # the interactive shell of salloc
        changed(REAL_BATCH, SLURM_STEP_ID="4294967291"),  # the batch script
    ],
)
def test_a_job_of_one_task_that_srun_did_not_start_is_alone(environ):
    assert cluster.resolve(environ) == cluster.Cluster(source="alone", workers=(), index=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4: Slurm job 4 has 4 tasks"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2: Slurm job 4 has 2 nodes"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"}, "Slurm job 4 has 4 tasks"),
    ],
)
def test_a_forgotten_srun_is_named(changes, says):
    message = refusal(changed(REAL_BATCH, **changes))
    assert says in message
    assert "Run 'srun python -m launcher.main" in message


# ------------------------------------------------------------------------------------------------------------ scontrol


@pytest.fixture
def path_with(tmp_path):
    """A PATH on which `scontrol` is a script."""

    def make(script):
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return f"{tmp_path}:/bin:/usr/bin"

    return make


def test_scontrol_is_asked_where_it_is_there(path_with):
    path = path_with('test "$*" = "show hostnames odd{1,2}" && printf "odd1\\nodd2\\n"')
    for environ in step(["odd1", "odd2"], [1, 1], nodelist="odd{1,2}", PATH=path):
        assert [worker.partition(":")[0] for worker in cluster.resolve(environ).workers] == ["odd1", "odd2"]


@pytest.mark.parametrize(
    "script", ["exit 1", "exit 0", "echo vm; exit 1", "echo Invalid hostlist: vm", "kill -9 $$", "exec sleep 600"]
)
def test_the_list_is_read_without_scontrol_where_it_does_not_work(script, path_with, monkeypatch):
    monkeypatch.setattr(slurm, "_SCONTROL_SECONDS", 0.2 if "sleep" in script else 60.0)
    (environ, _) = step(["n9", "n10"], [1, 1], nodelist="n[9-10]", PATH=path_with(script))
    assert [worker.partition(":")[0] for worker in cluster.resolve(environ).workers] == ["n9", "n10"]
