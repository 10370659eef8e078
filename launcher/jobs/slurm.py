"""The nodes of a Slurm allocation as hosts: a step of one task on each runs the agent.

Slurm owns the nodes and the time; the steps make sure that it also ends what runs there. A step takes all that the job
has on its node, whatever a task of the job was to have: the agent divides it among its workers.
"""

import re
import sys
from collections.abc import Mapping, Sequence

from launcher.errors import UsageError
from launcher.jobs.transports import Host, Refusal, Transport, has_any, split
from launcher.machine.cluster import slurm
from launcher.machine.cluster.claim import whole_number

_TO_SUBMIT = (
    "submit it: sbatch --nodes=2 --ntasks-per-node=1 scripts/slurm.sbatch --gin_file=RECIPE --model_dir=DIR; or get "
    "nodes first: salloc --nodes=2 --ntasks-per-node=1"
)
# What srun would take from the job's own options, and what is meant for each of the job's tasks.
_OF_TASKS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXCLUSIVE",
)  # fmt: skip
_OPTIONS = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # with the batch script, and with what is left of an earlier attempt
    "--mem=0",  # all that the job has
    "--cpu-bind=none",
    "--kill-on-bad-exit=0",
)
_TASK_ENDED = re.compile(r"srun: error: \S+: task 0: ")
# Of a node, both before what people write: its features may not have spaces, and its comment comes at the end.
_NODE = re.compile(r"NodeName=(\S+) (?:.*? )?NodeAddr=(\S+)")
# What stays wrong until somebody does something: the allocation has ended, or never was what the environment says.
_MISTAKES = (
    "Invalid job id", "Job/step already complet", "allocation has been revoked", "unrecognized option",
    "Requested node configuration is not available", "Unable to contact slurm controller", "not in this job",
)  # fmt: skip


def srun(environ: Mapping[str, str], workers: int | None, options: str = "") -> Transport:
    """The transport by srun, to the nodes of the allocation that this process is in: a batch script or salloc's shell.

    Without `workers`, there is one for each task of the job, or for each node where it does not count tasks. `options`
    of the person's own come last and so win.
    """
    further = split("srun_options", options)
    if further and not further[0].startswith("-"):
        raise UsageError(f"--srun_options={options}: {further[0]!r} is no option; write it as --NAME=VALUE")
    job = environ.get("SLURM_JOB_ID", "").strip()
    if not job:
        raise UsageError(f"--backend=slurm: there is no Slurm job here (SLURM_JOB_ID is not set); {_TO_SUBMIT}")
    if slurm.is_in_step(environ):
        raise UsageError(
            f"--backend=slurm: srun started this process (SLURM_STEP_ID={environ['SLURM_STEP_ID']}); start it once "
            "in the batch script itself, and it runs srun for every node. Or give --backend=member to every task"
        )
    if "SLURM_HET_SIZE" in environ:
        raise UsageError(
            f"--backend=slurm: job {job} is heterogeneous (SLURM_HET_SIZE={environ['SLURM_HET_SIZE']}), and the "
            "workers of one training have nodes of one kind; submit one component, without ':'"
        )
    names = slurm.node_names(environ, "SLURM_JOB_NODELIST", advice=_TO_SUBMIT)
    addresses = _addresses(environ, names)
    hosts = tuple(
        Host(name=name, address=addresses.get(name, name), slots=slots)
        for name, slots in zip(names, _slots(environ, len(names), workers), strict=True)
    )
    unset = [word for name in _OF_TASKS for word in ("-u", name)]
    template = ("env", *unset, "srun", "--nodelist={host}", *_OPTIONS, *further, "{command}")
    return Transport(hosts, template, _explain, f"this is Slurm job {job}: add the folder of Slurm's", "srun")


def _explain(host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
    """The reason of srun's own errors; it ends as its task does, and then says so."""
    said = [line for line in lines if line.startswith("srun: error:")]
    if not said or any(_TASK_ENDED.match(line) for line in said):
        return None
    what = said[0].removeprefix("srun: error:").strip()
    is_mistake = has_any(_MISTAKES, said)
    return Refusal(message=f"srun starts nothing on {host.name} ({what})", is_mistake=is_mistake)


def _slots(environ: Mapping[str, str], num_nodes: int, workers: int | None) -> list[int]:
    if workers is None or workers == _num_tasks(environ):
        if _num_tasks(environ) is None:
            return [1] * num_nodes
        return slurm.tasks_per_node(environ, "SLURM_TASKS_PER_NODE", num_nodes, advice=_TO_SUBMIT)
    share, rest = divmod(max(workers, num_nodes), num_nodes)
    if rest:
        raise UsageError(
            f"--workers={workers}: the {num_nodes} nodes of the Slurm job run the same number of workers each; "
            f"give a multiple of {num_nodes}, or leave it out and ask Slurm for tasks (--ntasks-per-node)"
        )
    return [share] * num_nodes


def _num_tasks(environ: Mapping[str, str]) -> int | None:
    """Tasks that the job asked for; None where it asked for none, and SLURM_TASKS_PER_NODE counts processors."""
    if not environ.get("SLURM_NTASKS", "").strip():
        return None
    return whole_number(environ, "SLURM_NTASKS", least=1, advice="Slurm counts the job's tasks in it")


def _addresses(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """NodeAddr of the nodes, by which Slurm itself reaches them; of none where the controller does not tell.

    Where it answers and this is not read of a node, a line says that its name is taken, which it is by default.
    """
    said = slurm.scontrol(environ, "--oneliner", "show", "node", environ["SLURM_JOB_NODELIST"])
    found = {node[1]: node[2] for node in map(_NODE.match, said.splitlines()) if node and node[2] != "(null)"}
    if said and (unread := [name for name in names if name not in found]):
        sys.stderr.write(f"note: scontrol shows no NodeAddr of {', '.join(unread[:5])}: its name is taken for it\n")
    return found
