"""Errors for users, exit codes for schedulers, and the nearest name to a mistyped one.

Whoever raises one of these promises that the message says what is wrong, the value seen and what to do;
`launcher.main` prints it without a traceback. What a user's own Python raised becomes one in
`failures.explained`; every other exception is ours and keeps its traceback.
"""

import difflib
import os
import traceback
from collections.abc import Collection

EXIT_DONE = 0
EXIT_PREEMPTED = 42
EXIT_USAGE = 64
EXIT_FAILED = 70
EXIT_RETRY = 75

# What each means, as the end of a sentence that begins with the number.
EXIT_CODES: dict[int | str, str] = {
    EXIT_DONE: "done",
    EXIT_PREEMPTED: "saved and preempted, run again",
    EXIT_USAGE: "bad flags, gin or input",
    EXIT_FAILED: "failed and a retry will not help",
    EXIT_RETRY: "a peer or the machine failed, run again",
}


TRACEBACK = "LAUNCHER_TRACEBACK"
"""Environment variable: 1 prints the whole traceback of a user's mistake, too."""


class LauncherError(Exception):
    """Base of the errors that end a run with a message and a documented exit code.

    Attributes:
      lines: of the user's own code, on the way to the error that this one tells of.
    """

    exit_code = EXIT_FAILED
    lines: tuple[str, ...] = ()

    # Leans on TensorFlow: AutoGraph passes an error with this attribute on as it is, without a stack around it. Noticed
    # by tests/machine/test_no_autograph.py. Then: users see "in user code:" around a message; find the new attribute.
    ag_pass_through = True

    def _render_traceback_(self) -> list[str]:
        """Lines that IPython, and so a notebook, shows in the place of a traceback: the hook that it has for this."""
        if os.environ.get(TRACEBACK) == "1":
            return "".join(traceback.format_exception(self)).splitlines()
        return [*self.lines, f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]


class UsageError(LauncherError):
    """Bad flags, gin, environment or input: exit 64. Nothing was written, unless only the training itself showed it."""

    exit_code = EXIT_USAGE


class MissingInputError(UsageError):
    """Input is not there: exit 64; 75 where the run has trained before, see `launcher.run.input_faults`."""


class TrainingError(LauncherError):
    """Training failed and running it again will fail again: exit 70."""

    exit_code = EXIT_FAILED


class Preempted(LauncherError):
    """Saved and asked to stop: exit 42, run the same command again.

    Attributes:
      signal: by which this process was; None for another reason, or another process.
    """

    exit_code = EXIT_PREEMPTED
    signal: int | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or a notebook's stop button, in a program that calls `launcher.fit`: what was trained is saved."""

    exit_code = EXIT_PREEMPTED
    _render_traceback_ = LauncherError._render_traceback_
    lines = ()


class PortTakenError(LauncherError):
    """Another process listens on the port that this worker was given: exit 75, run the same command again."""

    exit_code = EXIT_RETRY


class PeerError(LauncherError):
    """A peer or the machine failed: exit 75, run the same command again."""

    exit_code = EXIT_RETRY


class MachineError(LauncherError):
    """This machine is broken, not only a peer of it: exit 75, run the same command again, best without it."""

    exit_code = EXIT_RETRY


_SHOWN = 12


def nearest(name: str, choices: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The choice that `name` was most likely meant to be; None if none is as near as `cutoff` (1 for the same)."""
    spelled = {choice.lower(): choice for choice in sorted(choices)}
    begun = [choice for choice in spelled if name.lower().startswith(f"{choice}_")]  # as an older name may be
    found = begun or difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=cutoff)
    return spelled[found[0]] if found else None


def advice(name: str, choices: Collection[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'x'?", else the choices there are, else nothing."""
    close = nearest(name, choices)
    if close:
        return f"; did you mean {close!r}?"
    return f"; known: {listed(choices)}" if choices else ""


def listed(choices: Collection[str]) -> str:
    """The choices in alphabetical order, the first of them if there are many."""
    shown = sorted(choices)[:_SHOWN]
    more = f" and {len(choices) - len(shown)} more" if len(choices) > len(shown) else ""
    return f"{', '.join(shown)}{more}"
