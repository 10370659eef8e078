"""The tasks of a Slurm job step: `srun python -m launcher.main …` starts one worker a task.

Rank, size and nodes are the step's own variables (srun(1), OUTPUT ENVIRONMENT VARIABLES), so a step of fewer tasks than
its job is right too. Nothing here needs GPUs, a network or the controller.

A process of a job that srun did not start (the batch script's own shell, salloc's) has no peers. In a job of several
tasks or nodes that is most likely an srun forgotten, and refused; in a job of one task the process is alone.

Each task listens on a port of its own, which all tasks derive alike: LAUNCHER_PORT_BASE (20000 when unset) plus a slot
of 64 ports by job and step, plus the task's number on its node. Jobs and steps that share a node get different slots
as long as their ids are near each other; all slots together are 10048 ports, below those that Linux hands out itself.
"""

import itertools
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from launcher.errors import UsageError
from launcher.machine.cluster.claim import HOST, LAST_PORT, Claim, text, whole_number

PORT_BASE = "LAUNCHER_PORT_BASE"
DEFAULT_PORT_BASE = 20000
PORTS_PER_STEP = 64
NUM_SLOTS = 157
NUM_PORTS = PORTS_PER_STEP * NUM_SLOTS
# Leaves room for 18 jobs that follow between the first eight steps of a job.
_SLOTS_BETWEEN_STEPS = 19

# The batch script, salloc's interactive shell and the like are steps with an id from here on (slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_SCONTROL_SECONDS = 10.0
_COUNT = re.compile(r"(?P<tasks>[0-9]{1,6})(?:\(x(?P<nodes>[0-9]{1,6})\))?")
# Slurm itself refuses longer ranges.
MAX_HOSTS = 65536
# A name with bracketed sets of ranges in it, up to the next comma outside of brackets.
_HOST_NAME = re.compile(r"(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+")
_PART_OF_NAME = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<literal>[^\[\]]+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")
_BY_SRUN = "srun sets it for every task it starts: run the program as 'srun python -m launcher.main …'"
_UNCHANGED = "leave the variables that srun sets as they are, or name the workers in TF_CONFIG"


def claim(environ: Mapping[str, str]) -> Claim | None:
    """The claim of the job step; None outside of Slurm and in a job of one task that srun did not start.

    Raises UsageError where the step's variables are incomplete, or srun was forgotten.
    """
    step = whole_number(environ, "SLURM_STEP_ID", default=str(_FIRST_SPECIAL_STEP), advice=_BY_SRUN)
    if step >= _FIRST_SPECIAL_STEP:
        _refuse_forgotten_srun(environ)
        return None
    num_tasks = whole_number(environ, "SLURM_STEP_NUM_TASKS", least=1, advice=_BY_SRUN)
    rank = whole_number(
        environ,
        "SLURM_PROCID",
        most=num_tasks - 1,
        advice=f"it counts the step's tasks (SLURM_STEP_NUM_TASKS={num_tasks}) from 0; {_UNCHANGED}",
    )
    return Claim(
        source="slurm",
        to_train_alone="start one task with srun --ntasks=1",
        num_workers=num_tasks,
        index=rank,
        evidence=f"SLURM_PROCID={rank}, SLURM_STEP_NUM_TASKS={num_tasks}",
        marker="SLURM_STEP_ID",
        addresses=lambda: _addresses(environ, step, num_tasks, rank),
    )


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, as one of its tasks."""
    step = environ.get("SLURM_STEP_ID", "").strip()
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _refuse_forgotten_srun(environ: Mapping[str, str]) -> None:
    job = environ.get("SLURM_JOB_ID", "").strip()
    if not job:
        return
    # SLURM_TASKS_PER_NODE would not do: where no tasks were asked for, it counts CPUs.
    for variable, advice in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
        count = whole_number(environ, variable, default="1", advice=f"Slurm counts the job's {advice} in it")
        if count > 1:
            raise UsageError(
                f"{variable}={count}: Slurm job {job} has {count} {advice}, but srun did not start this process, so it "
                "has no peers. Run 'srun python -m launcher.main …' to train on all of them, or 'srun --nodes=1 "
                "--ntasks=1 python -m launcher.main …' to train alone"
            )


def _addresses(environ: Mapping[str, str], step: int, num_tasks: int, rank: int) -> tuple[str, ...]:
    job = whole_number(environ, "SLURM_JOB_ID", advice=_BY_SRUN)
    hosts = node_names(environ, "SLURM_STEP_NODELIST", advice=_BY_SRUN)
    counts = tasks_per_node(environ, "SLURM_STEP_TASKS_PER_NODE", len(hosts), advice=_BY_SRUN)
    if sum(counts) != num_tasks:
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']!r} makes {sum(counts)} tasks, but "
            f"SLURM_STEP_NUM_TASKS={num_tasks}: a step over several components of a heterogeneous job is not supported;"
            f" otherwise {_UNCHANGED}"
        )
    base = whole_number(
        environ,
        PORT_BASE,
        least=1024,
        most=LAST_PORT + 1 - NUM_PORTS,
        default=str(DEFAULT_PORT_BASE),
        advice=f"workers listen on ports from it to {NUM_PORTS - 1} above; give all tasks the same one, or unset it",
    )
    slot = (job + _SLOTS_BETWEEN_STEPS * step) % NUM_SLOTS
    if max(counts) > NUM_PORTS:
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE: {max(counts)} tasks on a node, but there are {NUM_PORTS} ports")
    places = _places(environ, counts)
    _check_own_place(environ, hosts, places[rank])
    return tuple(f"{hosts[node]}:{base + (PORTS_PER_STEP * slot + local) % NUM_PORTS}" for node, local in places)


def node_names(environ: Mapping[str, str], variable: str, *, advice: str) -> tuple[str, ...]:
    """The nodes that a variable such as SLURM_JOB_NODELIST names, in the order of `scontrol show hostnames`.

    Raises UsageError where it is missing (`advice` says what to do then), or names no nodes or one of them twice.
    """
    nodes = text(environ, variable, advice=advice)
    hosts = tuple(scontrol(environ, "show", "hostnames", nodes).split())
    if not hosts or not all(map(HOST.fullmatch, hosts)):  # it ends with 0 also when it could not read the list
        try:
            hosts = expand(nodes)
        except ValueError as error:
            raise UsageError(f"{variable}={nodes!r}: {error}; {_UNCHANGED}") from None
    repeated = len(hosts) - len(set(hosts))
    if repeated or not hosts:
        problem = "names a node twice" if repeated else "names no node"
        raise UsageError(f"{variable}={nodes!r} {problem}; {_UNCHANGED}")
    return hosts


def expand(hostlist: str) -> tuple[str, ...]:
    """The hosts of a list in Slurm's notation, `n[9-10,12],gpu-[01-03]-ib`, as `scontrol show hostnames` has them.

    Sets stand anywhere in a name, also several: the last one counts fastest, then, as in Slurm 22.05, the first, the
    second and so on. Numbers keep the zeros that the first of their range is written with. A suffix after the last set
    is read too, where Slurm 22.05 refuses it.

    Raises:
      ValueError: not such a list, with the part that is not.
    """
    hosts: list[str] = []
    # The names between the commas outside of brackets; empty ones are nothing, as for Slurm.
    for name in filter(None, map(str.strip, re.split(r",(?![^\[\]]*\])", hostlist))):
        if not _HOST_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a host name with ranges such as n[1-3,7]")
        parts = [_choices(match) for match in _PART_OF_NAME.finditer(name)]
        if len(hosts) + math.prod(map(len, parts)) > MAX_HOSTS:
            raise ValueError(f"{name!r} makes it more than {MAX_HOSTS} hosts")
        fastest = len(parts) - 1 - (len(parts) > 1 and not name.endswith("]"))
        order = sorted(range(len(parts)), key=lambda place: (place == fastest, -place))
        for chosen in itertools.product(*(parts[place] for place in order)):
            hosts.append("".join(part for _, part in sorted(zip(order, chosen, strict=True))))
    return tuple(hosts)


def _choices(match: re.Match[str]) -> list[str]:
    """The numbers of a set, or the one literal."""
    if match["literal"] is not None:
        return [match["literal"]]
    return [number for item in match["ranges"].split(",") for number in _numbers(item)]


def _numbers(item: str) -> list[str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} is not a number or a range such as 1-3")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"range {item!r} runs backwards")
    if last - first >= MAX_HOSTS:
        raise ValueError(f"range {item!r} is of more than {MAX_HOSTS} hosts")
    return [str(number).zfill(len(match["first"])) for number in range(first, last + 1)]


def scontrol(environ: Mapping[str, str], *arguments: str) -> str:
    """The answer of Slurm's controller; "" where there is no scontrol (in a container), or none that works."""
    program = shutil.which("scontrol", path=environ.get("PATH", ""))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout


def tasks_per_node(environ: Mapping[str, str], variable: str, num_nodes: int, *, advice: str) -> list[int]:
    """Tasks of each node, from "2(x3),1": three nodes with two tasks each, then one with one.

    Raises UsageError where it is missing (`advice` says what to do then), or says nothing of the kind for `num_nodes`.
    """
    given = text(environ, variable, advice=advice)
    groups = [_COUNT.fullmatch(group.strip()) for group in given.split(",")]
    pairs = [(int(group["tasks"]), int(group["nodes"] or 1)) for group in groups if group is not None]
    if len(pairs) < len(groups) or any(tasks == 0 or nodes == 0 for tasks, nodes in pairs):
        raise UsageError(f"{variable}={given!r} is not a list of counts such as 2(x3),1; {_UNCHANGED}")
    if sum(nodes for _, nodes in pairs) != num_nodes:
        nodelist = variable.replace("TASKS_PER_NODE", "NODELIST")
        raise UsageError(
            f"{variable}={given!r} is for {sum(nodes for _, nodes in pairs)} node(s), but {nodelist}="
            f"{environ.get(nodelist, '')!r} names {num_nodes}; {_UNCHANGED}"
        )
    return [tasks for tasks, nodes in pairs for _ in range(nodes)]


def _places(environ: Mapping[str, str], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Node and number on that node of every task, in the order of rank (srun(1), --distribution)."""
    given = environ.get("SLURM_DISTRIBUTION", "").strip()
    # What follows is how tasks are bound to the sockets of their node.
    across_nodes = re.split("[:,]", given.lower())[0]
    if across_nodes == "arbitrary" and len(counts) > 1:
        raise UsageError(f"SLURM_DISTRIBUTION={given!r}: its order cannot be known; use srun --distribution=block")
    # A node takes so many tasks before it is the next node's turn. Slurm's default is by blocks, except where every
    # node has one task, and then it is all the same.
    plane = whole_number(environ, "SLURM_DIST_PLANESIZE", least=1, default="1", advice=_UNCHANGED)
    turn = {"cyclic": 1, "plane": plane}.get(across_nodes, max(counts))
    return [
        (node, local)
        for start in range(0, max(counts), turn)
        for node, count in enumerate(counts)
        for local in range(start, min(start + turn, count))
    ]


def _check_own_place(environ: Mapping[str, str], hosts: Sequence[str], place: tuple[int, int]) -> None:
    """UsageError unless Slurm has put this task where the order of nodes and tasks says."""
    node, local = place
    for name, expected in (("SLURMD_NODENAME", hosts[node]), ("SLURM_LOCALID", str(local))):
        seen = environ.get(name, "").strip()
        if seen and seen != expected:
            raise UsageError(
                f"{name}={seen!r}, but by SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE and SLURM_DISTRIBUTION task "
                f"SLURM_PROCID={environ['SLURM_PROCID'].strip()} would have {expected!r}: use srun "
                f"--distribution=block, and {_UNCHANGED}"
            )
