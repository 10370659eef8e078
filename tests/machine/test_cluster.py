import json
import subprocess
import sys

import pytest

from launcher.errors import UsageError
from launcher.machine import cluster

TWO = ["a:1", "b:2"]


def resolve(cluster_spec=None, task=None):
    given = {"cluster": cluster_spec, "task": task}
    return cluster.resolve({"TF_CONFIG": json.dumps({key: value for key, value in given.items() if value is not None})})


NO_SCHEDULER = {
    "TF_CONFIG": "",
    "SLURM_JOB_ID": "",
    "SLURM_STEP_ID": " ",
    "JOB_COMPLETION_INDEX": "",
    "LAUNCHER_NUM_WORKERS": "",
    "TPU_WORKER_HOSTNAMES": ",",
}


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"PATH": "/bin"}, NO_SCHEDULER])
def test_a_process_that_nothing_speaks_of_is_alone(environ):
    found = cluster.resolve(environ)
    assert found == cluster.Cluster(source="alone", workers=(), index=0)
    assert found.num_workers == 1
    assert found.is_chief
    assert found.description == "one process, no peers"
    assert found.to_train_alone == ""


def test_workers_keep_their_order_and_their_index():
    found = resolve({"worker": TWO}, {"type": "worker", "index": 1})
    assert found == cluster.Cluster(source="TF_CONFIG", workers=("a:1", "b:2"), index=1)
    assert found.num_workers == 2
    assert not found.is_chief
    assert found.description == "worker 1 of 2 (b:2), from TF_CONFIG"


def test_the_first_worker_is_chief_when_no_chief_is_named():
    assert resolve({"worker": TWO}, {"type": "worker", "index": 0}).is_chief


@pytest.mark.parametrize(("task", "rank"), [(("chief", 0), 0), (("worker", 0), 1), (("worker", 1), 2)])
def test_a_chief_is_rank_0_and_workers_follow(task, rank):
    found = resolve({"worker": TWO, "chief": ["c:3"]}, {"type": task[0], "index": task[1]})
    assert found.workers == ("c:3", "a:1", "b:2")
    assert found.index == rank
    assert found.is_chief == (task[0] == "chief")


@pytest.mark.parametrize(("job", "spec"), [("worker", {"worker": ["a:1"]}), ("chief", {"chief": ["a:1"]})])
def test_a_single_worker_remembers_where_it_came_from(job, spec):
    found = resolve(spec, {"type": job, "index": 0})
    assert (found.source, found.num_workers, found.is_chief) == ("TF_CONFIG", 1, True)


@pytest.mark.parametrize(
    "address", ["host:1", "my-host.example_1.org:65535", "10.0.0.1:2222", "[::1]:2222", "[fd00::2]:1"]
)
def test_addresses_may_be_names_ipv4_or_bracketed_ipv6(address):
    assert resolve({"worker": [address]}, {"type": "worker", "index": 0}).workers == (address,)


def test_other_keys_of_tf_config_are_ignored():
    text = json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}, "environment": "cloud"})
    assert cluster.resolve({"TF_CONFIG": text}).num_workers == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{cluster: 1}", "not JSON"),
        ("{'cluster': {}}", "{'cluster': {}}"),
        ("[1]", "expected a JSON object, got [1]"),
        ("{}", '"cluster" must map "worker"'),
        ('{"task": {"type": "worker", "index": 0}}', "to lists, got null"),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, says):
    with pytest.raises(UsageError) as caught:
        cluster.resolve({"TF_CONFIG": text})
    assert says in str(caught.value)


WORKER_0 = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("spec", "task", "says"),
    [
        (TWO, WORKER_0, '"cluster" must map "worker"'),
        ({"worker": "a:1"}, WORKER_0, 'to lists, got {"worker": "a:1"}'),
        ({"worker": {"0": "a:1"}}, WORKER_0, "to lists, got"),
        ({"worker": []}, WORKER_0, "a worker at least"),
        ({"worker": TWO, "ps": ["p:1"]}, WORKER_0, '"ps": '),
        ({"worker": TWO, "evaluator": ["p:1"]}, WORKER_0, '"evaluator": '),
        ({"worker": TWO, "chief": ["c:1", "d:1"]}, WORKER_0, "one chief at most"),
        ({"worker": ["a"]}, WORKER_0, 'address "a" is not "host:port"'),
        ({"worker": ["a:"]}, WORKER_0, 'address "a:"'),
        ({"worker": [":1"]}, WORKER_0, 'address ":1"'),
        ({"worker": ["a:0"]}, WORKER_0, 'address "a:0"'),
        ({"worker": ["a:65536"]}, WORKER_0, 'address "a:65536"'),
        ({"worker": ["a:port"]}, WORKER_0, 'address "a:port"'),
        ({"worker": ["grpc://a:1"]}, WORKER_0, 'address "grpc://a:1"'),
        ({"worker": ["::1:2222"]}, WORKER_0, 'address "::1:2222"'),
        ({"worker": [1234]}, WORKER_0, "address 1234"),
        ({"worker": ["a:1", "b:2", "a:1"]}, WORKER_0, "'a:1' is given 2 times"),
        ({"worker": ["a:1"], "chief": ["a:1"]}, WORKER_0, "'a:1' is given 2 times"),
        ({"worker": TWO}, None, '"task" must have a "type"'),
        ({"worker": TWO}, ["worker", 0], 'got ["worker", 0]'),
        ({"worker": TWO}, {"index": 0}, 'got {"index": 0}'),
        ({"worker": TWO}, {"type": "evaluator", "index": 0}, '"type": "evaluator"'),
        ({"worker": TWO}, {"type": "ps", "index": 0}, '"type": "ps"'),
        ({"worker": TWO}, {"type": "chief", "index": 0}, 'task index 0: "cluster" has 0 chief(s)'),
        ({"chief": ["a:1"]}, WORKER_0, 'task index 0: "cluster" has 0 worker(s)'),
        ({"worker": TWO}, {"type": "worker"}, "task index null: "),
        ({"worker": TWO}, {"type": "worker", "index": "0"}, 'task index "0": '),
        ({"worker": TWO}, {"type": "worker", "index": 0.0}, "task index 0.0: "),
        ({"worker": TWO}, {"type": "worker", "index": True}, "task index true: "),
        ({"worker": TWO}, {"type": "worker", "index": 2}, 'task index 2: "cluster" has 2 worker(s)'),
        ({"worker": TWO}, {"type": "worker", "index": -1}, "task index -1: "),
    ],
)
def test_a_contradiction_is_refused_with_the_value_seen_and_a_correct_example(spec, task, says):
    with pytest.raises(UsageError) as caught:
        resolve(spec, task)
    assert says in str(caught.value)
    assert 'A correct one: TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", "host1:2222"]}' in str(caught.value)


def test_the_example_in_the_messages_is_itself_correct():
    with pytest.raises(UsageError) as caught:
        cluster.resolve({"TF_CONFIG": "?"})
    example = str(caught.value).split("TF_CONFIG='")[1].split("'")[0]
    assert cluster.resolve({"TF_CONFIG": example}).num_workers == 2


# ------------------------------------------------------------------------------------------------------ several sources


def tf_config(size, index):
    workers = [f"t{rank}:1" for rank in range(size)]
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}


def step(size, index):
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"n[1-{size}]",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})",
        "SLURM_PROCID": str(index),
    }


def pod(size, index):
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "JOBSET_NAME": "j",
        "REPLICATED_JOB_NAME": "w",
        "LAUNCHER_NUM_WORKERS": str(size),
    }


def tpu_host(size, index):
    hosts = ",".join(f"h{rank}" for rank in range(size))
    return {"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": str(index)}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({**tf_config(3, 2), **step(3, 2), **pod(3, 2), **tpu_host(3, 2)}, "TF_CONFIG"),
        ({**step(3, 2), **pod(3, 2), **tpu_host(3, 2)}, "slurm"),
        ({**pod(3, 2), **tpu_host(3, 2)}, "kubernetes"),
        (tpu_host(3, 2), "cloud_tpu"),
    ],
)
def test_the_source_nearest_to_the_person_is_taken(environ, source):
    found = cluster.resolve(environ)
    assert found.source == source
    assert source == "cloud_tpu" or (found.num_workers, found.index) == (3, 2)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**tf_config(2, 1), **step(3, 1)}, ["TF_CONFIG and slurm contradict", "worker 1 of 2", "worker 1 of 3"]),
        ({**tf_config(3, 0), **step(3, 1)}, ["SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=3", "unset TF_CONFIG to follow"]),
        ({**tf_config(1, 0), **step(3, 0)}, ["worker 0 of 1", "worker 0 of 3", "or SLURM_STEP_ID to follow TF_CONFIG"]),
        ({**tf_config(2, 1), **pod(2, 0)}, ["TF_CONFIG and kubernetes", "JOB_COMPLETION_INDEX=0"]),
        ({**tf_config(2, 1), **step(2, 1), **pod(4, 1)}, ["TF_CONFIG and kubernetes", "LAUNCHER_NUM_WORKERS=4"]),
        ({**step(2, 1), **pod(2, 0)}, ["slurm and kubernetes contradict"]),
    ],
)
def test_sources_that_disagree_about_rank_or_size_are_refused_by_name(environ, says):
    with pytest.raises(UsageError) as caught:
        cluster.resolve(environ)
    assert [part for part in says if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    "environ",
    [
        step(1, 0),  # srun --pty, or one step a host
        pod(1, 0),
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # workers that the batch script's shell starts
        {"JOB_COMPLETION_INDEX": "5"},
        {"SLURM_STEP_ID": "?"},
        tpu_host(4, 3),
        {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "?"},
    ],
)
def test_tf_config_stands_where_a_scheduler_knows_of_one_process_or_says_nothing_clear(environ):
    found = cluster.resolve({**tf_config(2, 1), **environ})
    assert (found.source, found.num_workers, found.index) == ("TF_CONFIG", 2, 1)


def test_each_source_can_be_left_by_what_it_says():
    places = [cluster.resolve(environ) for environ in (tf_config(2, 1), step(2, 1), pod(2, 1))]
    assert [place.num_workers for place in places] == [2, 2, 2]
    ways = [place.to_train_alone for place in places]
    assert ways[0] == "unset TF_CONFIG"
    assert "srun --ntasks=1" in ways[1]
    assert "JOB_COMPLETION_INDEX" in ways[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_SIZE", "2"),
        ("WORLD_SIZE", "16"),
        ("FLUX_JOB_SIZE", "2"),
        ("LSB_MCPU_HOSTS", "node-1 4 node-2 4"),
        ("SM_HOSTS", '["algo-1", "algo-2"]'),
        ("PBS_NODEFILE", "a.lan\na.lan\nb.lan\n"),
    ],
)
def test_processes_that_somebody_started_and_nobody_joined_are_refused(name, value, tmp_path):
    def named(value):
        if name == "PBS_NODEFILE":
            (tmp_path / "nodes").write_text(value)
            return {name: str(tmp_path / "nodes")}
        return {name: value}

    with pytest.raises(UsageError, match=f"{name} says .* processes or hosts, and nothing says how they are joined"):
        cluster.resolve(named(value))
    assert cluster.resolve({**tf_config(2, 1), **named(value)}).num_workers == 2
    alone = {"LSB_MCPU_HOSTS": "node-1 8", "SM_HOSTS": '["algo-1"]', "PBS_NODEFILE": "a.lan\na.lan\n"}
    assert cluster.resolve(named(alone.get(name, "1"))).source == "alone"


# ------------------------------------------------------------------------------------------------------------ Cloud TPU


@pytest.mark.parametrize("environ", [tpu_host(1, 0), tpu_host(4, 0), tpu_host(4, 3), {"TPU_WORKER_HOSTNAMES": "h0,h1"}])
def test_the_hosts_of_a_tpu_are_no_peers_because_one_program_drives_them(environ):
    found = cluster.resolve(environ)
    assert found == cluster.Cluster(source="cloud_tpu", workers=(), index=0)
    assert found.num_workers == 1
    assert "host 0" in found.description


@pytest.mark.parametrize("worker", ["4", "-1", "x"])
def test_a_tpu_host_that_is_none_of_the_hosts_is_refused(worker):
    with pytest.raises(UsageError) as caught:
        cluster.resolve({**tpu_host(4, 0), "TPU_WORKER_ID": worker})
    assert f"TPU_WORKER_ID={worker!r} is not a whole number from 0 to 3" in str(caught.value)
    assert "TPU_WORKER_HOSTNAMES names 4 host(s), h0 first" in str(caught.value)


@pytest.mark.parametrize(
    ("tpu", "host", "says"), [("local", 0, "TPU pod of 4 hosts"), ("node", 2, "host 2 of the TPU")]
)
def test_training_from_the_wrong_host_of_a_pod_is_still_refused(tpu, host, says):
    from launcher.machine import strategy
    from launcher.machine.devices import Devices

    environ = tpu_host(4, host)
    with pytest.raises(UsageError) as caught:
        strategy.plan(
            requested="auto",
            replicas=16,
            tpu=tpu,
            cluster=cluster.resolve(environ),
            environ=environ,
            devices=Devices(tpus=("/physical_device:TPU:0",)),
        )
    assert says in str(caught.value)


def test_a_cluster_is_found_without_tensorflow():
    program = (
        "import sys; from launcher.machine.cluster import resolve; resolve({'TPU_WORKER_HOSTNAMES': 'a'}); "
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
