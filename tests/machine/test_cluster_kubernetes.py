import pytest

from launcher.errors import UsageError
from launcher.machine import cluster

ANNOTATION = "metadata.annotations['jobset.sigs.k8s.io/"
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "resnet-workers-0-1",
    "JOBSET_NAME": "resnet",
    "REPLICATED_JOB_NAME": "workers",
    "LAUNCHER_NUM_WORKERS": "3",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-2",
    "LAUNCHER_SERVICE": "peers",
    "LAUNCHER_NUM_WORKERS": "3",
}


def changed(environ, **changes):
    """The environment with some variables set, or removed where None."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("environ", "workers", "index"),
    [
        (JOBSET, "resnet-workers-0-{}.resnet:2222", 1),
        (changed(JOBSET, LAUNCHER_SERVICE="net"), "resnet-workers-0-{}.net:2222", 1),
        (changed(JOBSET, LAUNCHER_PORT_BASE="4000"), "resnet-workers-0-{}.resnet:4000", 1),
        (changed(JOBSET, HOSTNAME=None), "resnet-workers-0-{}.resnet:2222", 1),
        (changed(JOBSET, HOSTNAME="gke-node-0-1"), "resnet-workers-0-{}.resnet:2222", 1),  # hostNetwork
        (changed(JOBSET, JOB_NAME="elsewhere"), "resnet-workers-0-{}.resnet:2222", 1),
        (INDEXED_JOB, "train-{}.peers:2222", 2),
        (changed(INDEXED_JOB, HOSTNAME="a-b-0-2"), "a-b-0-{}.peers:2222", 2),
        (changed(INDEXED_JOB, HOSTNAME="gke-node-7", JOB_NAME="fit"), "fit-{}.peers:2222", 2),
        (changed(INDEXED_JOB, LAUNCHER_SERVICE="p.n.svc.cluster.local"), "train-{}.p.n.svc.cluster.local:2222", 2),
    ],
)
def test_the_variables_of_a_pod_make_a_cluster(environ, workers, index):
    expected = tuple(workers.format(pod) for pod in range(3))
    assert cluster.resolve(environ) == cluster.Cluster(source="kubernetes", workers=expected, index=index)


def test_a_pod_says_where_it_stands():
    found = cluster.resolve(JOBSET)
    assert found.description == "worker 1 of 3 (resnet-workers-0-1.resnet:2222), from kubernetes"
    assert "unset JOB_COMPLETION_INDEX" in found.to_train_alone


@pytest.mark.parametrize("environ", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"JOBSET_NAME": "resnet"}])
def test_a_pod_without_an_index_is_alone(environ):
    assert cluster.resolve(environ).source == "alone"


@pytest.mark.parametrize("knows_its_name", [True, False])
def test_all_pods_derive_the_same_workers_and_each_a_rank_of_its_own(knows_its_name):
    own = [f"resnet-workers-0-{pod}" for pod in range(5)]  # as the JobSet controller names pods
    environs = [
        changed(JOBSET, JOB_COMPLETION_INDEX=str(pod), LAUNCHER_NUM_WORKERS="5", HOSTNAME=name * knows_its_name)
        for pod, name in enumerate(own)
    ]
    found = [cluster.resolve(environ) for environ in environs]
    assert {place.workers for place in found} == {tuple(f"{name}.resnet:2222" for name in own)}
    assert [place.index for place in found] == list(range(5))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"LAUNCHER_NUM_WORKERS": "2"}, "JOB_COMPLETION_INDEX is missing or empty: Kubernetes sets it"),
        ({"JOB_COMPLETION_INDEX": "0"}, "LAUNCHER_NUM_WORKERS is missing or empty: JOB_COMPLETION_INDEX is set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "to train alone in every pod, unset JOB_COMPLETION_INDEX"),
        (changed(JOBSET, LAUNCHER_NUM_WORKERS="0"), "LAUNCHER_NUM_WORKERS='0' is not a whole number of 1 or more"),
        (changed(JOBSET, LAUNCHER_NUM_WORKERS="three"), "LAUNCHER_NUM_WORKERS='three'"),
        (changed(JOBSET, JOB_COMPLETION_INDEX="3"), "JOB_COMPLETION_INDEX='3' is not a whole number from 0 to 2"),
        (changed(JOBSET, JOB_COMPLETION_INDEX="-1"), "JOB_COMPLETION_INDEX='-1'"),
        (changed(JOBSET, LAUNCHER_NUM_WORKERS="1"), "LAUNCHER_NUM_WORKERS=1; let it be the completions"),
        (changed(JOBSET, REPLICATED_JOB_NAME=None), "REPLICATED_JOB_NAME is missing or empty: set it in the pod"),
        (changed(JOBSET, REPLICATED_JOB_NAME=None), f"{ANNOTATION}replicatedjob-name']"),
        (changed(JOBSET, HOSTNAME="resnet-workers-1-1"), "make this pod 'resnet-workers-0-1'"),
        (changed(JOBSET, HOSTNAME="resnet-workers-1-1"), "the replicated job of a JobSet one replica"),
        (changed(JOBSET, JOBSET_NAME="res net"), "'res net-workers-0-0' is no name in DNS"),
        (changed(JOBSET, JOBSET_NAME="r" * 60), "longer than 63 characters"),
        (changed(JOBSET, LAUNCHER_SERVICE="a/b"), "'a/b' is no name in DNS"),
        (changed(JOBSET, LAUNCHER_PORT_BASE="0"), "LAUNCHER_PORT_BASE='0' is not a whole number from 1 to 65535"),
        (changed(INDEXED_JOB, LAUNCHER_SERVICE=None), "LAUNCHER_SERVICE is missing or empty"),
        (changed(INDEXED_JOB, HOSTNAME=None), "JOB_NAME is missing or empty, and HOSTNAME='' is not the name"),
        (changed(INDEXED_JOB, HOSTNAME="train-1"), "HOSTNAME='train-1' is not the name of a Job and -2"),
        (changed(INDEXED_JOB, HOSTNAME="-2"), "metadata.labels['batch.kubernetes.io/job-name']"),
        (changed(INDEXED_JOB, HOSTNAME="train-1", JOB_NAME="train"), "make this pod 'train-2'"),
    ],
)
def test_a_pod_that_contradicts_itself_is_refused_with_what_to_do(environ, says):
    with pytest.raises(UsageError) as caught:
        cluster.resolve(environ)
    assert says in str(caught.value)
