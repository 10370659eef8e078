import json

import pytest

from launcher import cluster
from launcher.errors import UsageError

TWO = ["a:1", "b:2"]


def resolve(cluster_spec=None, task=None):
    given = {"cluster": cluster_spec, "task": task}
    return cluster.resolve({"TF_CONFIG": json.dumps({key: value for key, value in given.items() if value is not None})})


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"PATH": "/bin"}])
def test_a_process_without_tf_config_is_alone(environ):
    found = cluster.resolve(environ)
    assert found == cluster.Cluster(source="alone", workers=(), index=0)
    assert found.num_workers == 1
    assert found.is_chief
    assert found.description == "one process, no peers"


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
        ("{}", 'no "cluster"'),
        ('{"task": {"type": "worker", "index": 0}}', 'no "cluster"'),
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
        (TWO, WORKER_0, '"cluster" must map job names'),
        ({"worker": "a:1"}, WORKER_0, 'must be a list of "host:port", got "a:1"'),
        ({"worker": {"0": "a:1"}}, WORKER_0, "must be a list"),
        ({"worker": []}, WORKER_0, "has no workers"),
        ({"worker": TWO, "ps": ["p:1"]}, WORKER_0, "job 'ps'"),
        ({"worker": TWO, "evaluator": ["p:1"]}, WORKER_0, "job 'evaluator'"),
        ({"worker": TWO, "chief": ["c:1", "d:1"]}, WORKER_0, "2 chiefs"),
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
        ({"worker": TWO}, None, 'no "task"'),
        ({"worker": TWO}, ["worker", 0], '"task" must be an object'),
        ({"worker": TWO}, {"index": 0}, "task type null"),
        ({"worker": TWO}, {"type": "evaluator", "index": 0}, 'task type "evaluator" is not supported'),
        ({"worker": TWO}, {"type": "ps", "index": 0}, 'task type "ps" is not supported'),
        ({"worker": TWO}, {"type": "chief", "index": 0}, "this task is a chief"),
        ({"chief": ["a:1"]}, WORKER_0, "this task is a worker"),
        ({"worker": TWO}, {"type": "worker"}, "whole number, got null"),
        ({"worker": TWO}, {"type": "worker", "index": "0"}, 'whole number, got "0"'),
        ({"worker": TWO}, {"type": "worker", "index": 0.0}, "whole number, got 0.0"),
        ({"worker": TWO}, {"type": "worker", "index": True}, "whole number, got true"),
        ({"worker": TWO}, {"type": "worker", "index": 2}, "index 2 is out of range"),
        ({"worker": TWO}, {"type": "worker", "index": -1}, "index -1 is out of range"),
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
