"""Hosts, as --hosts and --hostfile name them, and transports, such as ssh: how an agent comes to run on one."""

import dataclasses
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.errors import UsageError

AGENT = "LAUNCHER_AGENT"
PLACE = "LAUNCHER_PLACE"  # what an agent tells of its host, where the transport learns it there
NO_INPUT = "the connection has ended"

# Nothing that a program could take for an option.
_HOST = re.compile(r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]*)@)?(?P<address>[A-Za-z0-9][A-Za-z0-9._-]*)")
_PLACE = re.compile(r"\{(host|index|command)\}")
_SHELL = re.compile(r"-[a-z]*c")
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,3})")

_OWN = re.compile(r"(\S*/)?env: |.*No module named ")
_NO_FOLDER, _NOT_EXECUTABLE, _NOT_FOUND = 125, 126, 127  # as `env` ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a job.

    It has a name as the person wrote it, perhaps with a user ("user@a"), an address by which workers of other hosts
    reach its own ("a"), and so many workers.
    """

    name: str
    address: str
    slots: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why no agent runs on a host and what to do; a mistake stays wrong until a person does something."""

    message: str
    is_mistake: bool


@dataclasses.dataclass(frozen=True)
class Transport:
    """One way of running a program on other hosts, with its standard streams connected to this one.

    When the process that runs here ends, or its standard input closes, the program's standard input must close.

    Attributes:
      hosts: of the job, in the order of their workers' ranks.
      template: the words of the command line here. {host} stands for a host as the person wrote it, {index} for its
        number from 0, and {command} for the words of the command; in a longer word and behind a shell's -c it stands
        for one word, quoted for a shell.
      explain: the transport's own reason, by a host, an exit code and the last lines of its stderr; None when it says
        nothing, so that both are the command's.
      advice: what to do where `program`, by default the first word, is none here.
    """

    hosts: tuple[Host, ...]
    template: tuple[str, ...]
    explain: Callable[[Host, int, Sequence[str]], Refusal | None]
    advice: str = ""
    program: str = ""

    @property
    def missing(self) -> str:
        """The program that is needed and not found here, and what to do; "" where it is found. A plan needs none."""
        return missing(self.program or self.template[0], self.advice)

    def argv(self, host: Host, command: Sequence[str]) -> tuple[str, ...]:
        """The command line that runs `command` on `host` from here."""
        values = {"host": host.name, "index": str(self.hosts.index(host)), "command": shlex.join(command)}
        words: list[str] = []
        for before, word in zip(("", *self.template), self.template, strict=False):
            is_whole = word == "{command}" and not _SHELL.fullmatch(before)
            words += command if is_whole else [_PLACE.sub(lambda match: values[match[1]], word)]
        return tuple(words)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """The agent's command line on every host: the interpreter there, and its working directory.

    `environ` has what Python needs to find the launcher; other variables travel in the agent's first message.
    """

    python: str
    folder: str
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self, mark: str) -> tuple[str, ...]:
        """The command; `mark` distinguishes this agent and all it starts from any other.

        No word has anything that a shell would read in its own way, unless a path has: it need not be quoted for one.
        """
        variables = [f"{name}={value}" for name, value in {AGENT: mark, **self.environ}.items()]
        return ("env", "-C", self.folder, *variables, self.python, "-m", "launcher.jobs.agent")

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal:
        """Why the command has ended on a host before it said a word."""
        # srun and mpirun have the last word, and it is only that the command has ended.
        own = [line for line in lines if _OWN.match(line)]
        said = last_words(own or [line for line in lines if not line.startswith("srun: ")])
        if exit_code == _NO_FOLDER and own:  # containers' programs end with it, too
            what = f"{host.name} has no folder {self.folder} ({said}); make it, or name another by --remote_dir"
        elif exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
            what = f"{host.name} has no interpreter {self.python} ({said}); install it, or give --remote_python=PATH"
        elif "No module named" in said:
            what = (
                f"{self.python} on {host.name} does not find the launcher ({said}); install it there, or name the "
                "folder of its checkout by --remote_dir"
            )
        else:
            what = f"no agent runs on {host.name}: it ended with exit code {exit_code} ({said})"
            return Refusal(message=what, is_mistake=False)
        return Refusal(message=what, is_mistake=True)


_SSH_OPTIONS = (
    "-T", "-x",  # no terminal, no windows
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=2",  # one that breaks without a word is noticed after about six seconds
    "-o", "ServerAliveCountMax=3",
    "-o", "ControlPath=none",  # a connection of its own, which ends with this process
)  # fmt: skip
# What a person has to mend, as OpenSSH puts it.
_SSH_MISTAKES = (
    "Permission denied", "Host key verification failed", "IDENTIFICATION HAS CHANGED", "Too many authentication",
    "Bad configuration option", "Name or service not known", "No address associated", "no matching", "usage: ssh",
    "unknown option", "illegal option", "Bad port", "Can't open user config file",
)  # fmt: skip


def ssh(hosts: tuple[Host, ...], command: str = "ssh") -> Transport:
    """The transport by OpenSSH's client, which must need no password.

    Options of the person's own in `command`, as in "ssh -p 2222", come first and so win.
    """
    client = split("ssh_command", command, "leave it out for ssh")

    def explain(host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        if exit_code != 255:  # with which the client ends whatever went wrong with the connection
            return None
        said = last_words(lines)
        if has_any(_SSH_MISTAKES, lines):
            by_hand = shlex.join([*client, host.name, "true"])
            message = f"ssh to {host.name} is refused ({said}); first make this work without a password: {by_hand}"
            return Refusal(message=message, is_mistake=True)
        return Refusal(message=f"{host.name} cannot be reached by ssh ({said})", is_mistake=False)

    # The command is one word: the login shell on the host takes it apart again.
    template = (*client, *_SSH_OPTIONS, "{host}", "exec {command}")
    return Transport(hosts, template, explain, "install an OpenSSH client, or name another by --ssh_command")


def by_command(hosts: tuple[Host, ...], command: str) -> Transport:
    """The transport by a program of the person's own, as in "kubectl exec -i {host} -- {command}"."""
    advice = "say how a program runs on a host, as in 'kubectl exec -i {host} -- {command}'"
    template = split("command", command, advice)
    if not any("{command}" in word for word in template):
        raise UsageError(f"--command={command}: has no {{command}}; {advice}")
    if len(hosts) > 1 and not any("{host}" in word or "{index}" in word for word in template):
        raise UsageError(f"--command={command}: has no {{host}} and no {{index}}, for {len(hosts)} hosts")

    def explain(host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """The agent's words when it hears nothing; whatever else the program says is the command's."""
        if not has_any([NO_INPUT], lines):
            return None
        message = f"the agent on {host.name} gets no input; --command must pass it on, as kubectl exec does with -i"
        return Refusal(message=message, is_mistake=True)

    return Transport(hosts, template, explain, "install it, or name another by --command")


def split(flag: str, value: str, advice: str = "") -> tuple[str, ...]:
    """The words of a command line; `advice` is for where there must be some."""
    try:
        words = tuple(shlex.split(value))
    except ValueError as error:
        raise UsageError(f"--{flag}={value}: {error}; quote it as a shell would need it") from None
    if advice and not words:
        raise UsageError(f"--{flag} is empty; {advice}")
    return words


def missing(program: str, advice: str) -> str:
    """Words that there is no such program on PATH, and what to do; empty where there is."""
    return "" if shutil.which(program) else f"there is no {program} on PATH; {advice}"


def has_any(signs: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether one of the signs stands in one of the lines."""
    return any(sign in line for sign in signs for line in lines)


def last_words(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "it said nothing")


def parse_hosts(hosts: str | None, hostfile: str | None, workers: int | None) -> tuple[Host, ...]:
    """The hosts that --hosts or --hostfile names, with `workers` divided among them; None: by slots, or one a host.

    Hosts that fewer workers leave over have a slot, too: they take the place of others.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError(f"--hosts={hosts} and --hostfile={hostfile}: give one of them")
    if hosts is not None:
        source, named = f"--hosts={hosts}", [_host(word.strip(), f"--hosts={hosts}") for word in hosts.split(",")]
    elif hostfile is not None:
        source, named = f"--hostfile={hostfile}", _read(hostfile)
    else:
        raise UsageError("which hosts? give --hosts=a,b,c or --hostfile=FILE")
    addresses = [host.address for host in named]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(f"{source}: {address!r} is named twice; for several workers a host, raise --workers")
    share, rest = divmod(max(workers or 0, len(named)), len(named))
    if any(host.slots for host in named):
        share, slots = 1, sum(host.slots or 1 for host in named)
        if (workers or 0) > slots:
            raise UsageError(f"--workers={workers}: {source} has slots for {slots}; leave --workers out")
    elif rest:
        raise UsageError(
            f"--workers={workers}: give a multiple of the {len(named)} hosts, fewer, which leaves the last hosts "
            "as spares, or a --hostfile with slots"
        )
    return tuple(dataclasses.replace(host, slots=host.slots or share) for host in named)


def _read(hostfile: str) -> list[Host]:
    try:
        text = Path(hostfile).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile={hostfile}: cannot be read: {getattr(error, 'strerror', error)}") from None
    lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), start=1)]
    named = [_host(" ".join(words), f"--hostfile={hostfile}, line {number}") for number, words in lines if words]
    if not named:
        raise UsageError(f"--hostfile={hostfile}: names no host; write one a line")
    return named


def _host(text: str, source: str) -> Host:
    """A host with the slots that `text` gives it, or 0."""
    name, _, rest = text.partition(" ")
    match = _HOST.fullmatch(name)
    if match is None:
        raise UsageError(f"{source}: {name!r} is not a host; write NAME or USER@NAME")
    slots = _SLOTS.fullmatch(rest)
    if rest and slots is None:
        raise UsageError(f"{source}: {rest!r} behind {name}: only slots=K is known, the number of its workers")
    return Host(name=name, address=match["address"], slots=int(slots[1]) if slots else 0)
