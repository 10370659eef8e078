"""Transports, such as ssh: how an agent comes to run on a host, and what it means when it does not."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Protocol

from launcher.errors import UsageError
from launcher.jobs.hosts import Host

AGENT = "LAUNCHER_AGENT"

_NO_FOLDER = 91
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
# `env` in the place of the shell ends with its exit codes above, and any shell can start `sh`.
_SCRIPT = f'cd -- "$1" || exit {_NO_FOLDER}; shift; exec env "$@"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why no agent runs on a host.

    Attributes:
      message: what is wrong and what to do; names the host.
      is_mistake: whether it stays wrong until a person does something.
    """

    message: str
    is_mistake: bool


class Transport(Protocol):
    """One way of running a program on other hosts, with its standard streams connected to this one.

    When the process that runs here ends, or its standard input closes, the program's standard input must close.

    Attributes:
      hosts: of the job, in the order of their workers' ranks.
      missing: the program that is needed and not found here, and what to do; empty where it is found. A plan, which
        runs nothing, needs none.
    """

    hosts: tuple[Host, ...]
    missing: str

    def argv(self, host: Host, command: Sequence[str]) -> tuple[str, ...]:
        """What to run here, so that `command` runs on `host`."""

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """What the transport itself says by an exit code and the last lines of its stderr; None when it says nothing,
        so that both are the command's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """The agent's command line on every host.

    Attributes:
      python: the interpreter there.
      folder: the working directory there.
      environ: variables that Python needs to find the launcher; others travel in the agent's first message.
    """

    python: str
    folder: str
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def words(self, mark: str) -> tuple[str, ...]:
        """The command; `mark` distinguishes this agent and all it starts from any other."""
        variables = [f"{name}={value}" for name, value in {AGENT: mark, **self.environ}.items()]
        run = [*variables, self.python, "-m", "launcher.jobs.agent"]
        return ("sh", "-c", _SCRIPT, "launcher", self.folder, *run)

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal:
        """Why the command has ended on a host before it said a word."""
        # srun has the last word, and it is only that the command has ended.
        said = last_words([line for line in lines if not line.startswith("srun: ")])
        if exit_code == _NO_FOLDER:
            what = f"{host.name} has no folder {self.folder}; make it, or name another by --remote_dir"
        elif exit_code in (_NOT_FOUND, _NOT_EXECUTABLE):
            what = f"{host.name} has no interpreter {self.python} ({said}); install it, or give --remote_python=PATH"
        elif "No module named" in said:
            what = (
                f"{self.python} on {host.name} does not find the launcher ({said}); install it there, or name the "
                "folder of its checkout by --remote_dir"
            )
        else:
            return Refusal(
                message=f"no agent runs on {host.name}: it ended with exit code {exit_code} ({said})", is_mistake=False
            )
        return Refusal(message=what, is_mistake=True)


class Ssh:
    """Runs commands by OpenSSH's client, which must need no password.

    A connection that breaks without a word is noticed after about six seconds.

    Args:
      hosts: of the job.
      command: the client with options of the person's own, which come first and so win: "ssh -p 2222".

    Raises:
      UsageError: it is no command.
    """

    OPTIONS = (
        "-T", "-x",  # no terminal, no windows
        "-o", "BatchMode=yes",
        "-o", "ConnectTimeout=10",
        "-o", "ServerAliveInterval=2",
        "-o", "ServerAliveCountMax=3",
        "-o", "ControlPath=none",  # a connection of its own, which ends with this process
    )  # fmt: skip

    # What a person has to mend, as OpenSSH puts it.
    _MISTAKES = (
        "Permission denied", "Host key verification failed", "IDENTIFICATION HAS CHANGED", "Too many authentication",
        "Bad configuration option", "Name or service not known", "No address associated", "no matching", "usage: ssh",
        "unknown option", "illegal option", "Bad port", "Can't open user config file",
    )  # fmt: skip

    def __init__(self, hosts: tuple[Host, ...], command: str = "ssh"):
        self.hosts = hosts
        try:
            self._command = tuple(shlex.split(command))
        except ValueError as error:
            raise UsageError(f"--ssh_command={command}: {error}; quote it as a shell would need it") from None
        if not self._command:
            raise UsageError("--ssh_command is empty; leave it out for ssh")
        self.missing = missing(self._command[0], "install an OpenSSH client, or name another by --ssh_command")

    def argv(self, host: Host, command: Sequence[str]) -> tuple[str, ...]:
        """The client's command line. The command is one word: the login shell on the host takes it apart again."""
        return (*self._command, *self.OPTIONS, host.name, f"exec {shlex.join(command)}")

    def explain(self, host: Host, exit_code: int, lines: Sequence[str]) -> Refusal | None:
        """OpenSSH's client ends with 255 for whatever went wrong with the connection."""
        if exit_code != 255:
            return None
        said = last_words(lines)
        if any(sign in line for sign in self._MISTAKES for line in lines):
            by_hand = shlex.join([*self._command, host.name, "true"])
            message = f"ssh to {host.name} is refused ({said}); first make this work without a password: {by_hand}"
            return Refusal(message=message, is_mistake=True)
        return Refusal(message=f"{host.name} cannot be reached by ssh ({said})", is_mistake=False)


def missing(program: str, advice: str, path: str | None = None) -> str:
    """That there is no such program on `path`, by default PATH, and what to do; empty where there is."""
    return "" if shutil.which(program, path=path) else f"there is no {program} on PATH; {advice}"


def last_words(lines: Sequence[str]) -> str:
    """The last line with something in it."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
