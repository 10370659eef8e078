"""Failures by cause: the user's, ours, a machine's or a peer's, and so the exit code of an exception.

A peer's death has many faces. Where workers train together, TensorFlow says UnavailableError or AbortedError; a program
that drives the hosts of a TPU pod also sees what is left of a host that was taken away and has come back empty.
"""

import errno
import inspect
import os
import re
import sys
from typing import Any

from launcher.errors import EXIT_FAILED, EXIT_RETRY, LauncherError, MachineError, PeerError, UsageError, user_code

# What the system says of a disk, a mount or a network that may come back, and of what may be had again. All else, such
# as ENOENT, EACCES and EROFS, stays until somebody changes it.
_COMES_BACK = (
    "EIO EREMOTEIO ESTALE ENOTCONN ENODEV ENXIO EBUSY ETIMEDOUT ESHUTDOWN ECONNABORTED "
    "ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH"
)
_ABSENT, _PASSING = (
    {getattr(errno, name) for name in names.split() if hasattr(errno, name)}
    for names in (_COMES_BACK, f"{_COMES_BACK} ENOSPC EDQUOT ENOMEM EAGAIN ENFILE")
)
# In TensorFlow's words, behind the file's name, and in those of Python inside of TensorFlow.
_OF_A_FILE = re.compile(rf"(\S*(?:; |\[Errno \d+\] )(?:{'|'.join(map(os.strerror, sorted(_ABSENT)))}))")

_PATH = re.compile(r"[\w.~-]*/[^\s'\",;:()]+")

# What a host that has restarted no longer knows, in the words of TensorFlow 2.21: those that its own coordinator of
# remote workers goes by (`_is_worker_failure` in tensorflow/python/distribute/coordinator/cluster_coordinator.py), and
# what a worker says of a context or a session that it has lost (tensorflow/core/distributed_runtime/
# eager/eager_service_impl.cc and session_mgr.cc).
# Leans on TensorFlow: a host that restarted is known by these messages. Noticed by tests/errors/test_failures.py. Then:
# read the two files named above in the new version.
_RESTARTED = (
    "unknown device",
    "primary device is not remote",
    "unable to find the relevant tensor remote_handle",
    "found to be poisoned",  # what a step on a host that was just lost was to have given
    "is neither a type of a primitive operation nor a name of a function registered",
    "unable to find a context_id matching the specified one",
    "possibly, this worker just restarted",
)

# Of the CPU's kernels for cross-entropy; a GPU's give NaN instead.
# Leans on TensorFlow: the CPU's cross-entropy names a label out of range in these words. Noticed by
# tests/test_user_mistakes.py, tests/modes/test_fit.py. Then: take the new words; without them the message is
# TensorFlow's.
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")

# What the launcher's own Python and graphs say of a user's data while a pipeline runs, within TensorFlow's error; and
# what others say that may pass.
_IN_PIPELINE = re.compile(r"(?:^|\[)UsageError: ([^\]\n]+)", re.MULTILINE)
_MAY_PASS = re.compile(r"UNKNOWN: (Connection|Timeout|OS|IO|BrokenPipe)\w*Error|^(Connection|Timeout|OS|IO)\w*Error: ")

# What TensorFlow raises of an operation whose inputs are wrong, rather than of a machine that cannot compute it.
_WRONG_INPUT = ("InvalidArgumentError", "NotFoundError", "UnimplementedError")


def explained(error: BaseException) -> BaseException:
    """Translates an exception for users: into the LauncherError that it is or, from a user's own Python, stands for.

    Else returns `error` itself, which is ours or the machine's and keeps its traceback.
    """
    original = unwrap(error)
    if what := _absent(original):
        return MachineError(f"{what}. A disk or a mount may come back: run the same command again when it has")
    if isinstance(original, LauncherError):
        return original
    if not isinstance(original, Exception) or exit_code(original) == EXIT_RETRY or isinstance(original, MemoryError):
        return error
    if _is_op_error(original):
        if (told := _IN_PIPELINE.search(str(original))) is not None:
            return UsageError(told[1])
        is_python = "Traceback (most recent call last)" in str(original) and not _MAY_PASS.search(str(original))
        if type(original).__name__ not in _WRONG_INPUT and not is_python:
            return error
    try:
        return user_code.mistake(original) or _mistake_in_data(original) or error
    except Exception:  # such as a frame of another form in another TensorFlow: the traceback says all
        return error


def _mistake_in_data(error: Exception) -> UsageError | None:
    label = _LABEL.search(str(error))
    return label and UsageError(
        f"a label of the data is {label[1]}, and the model has outputs for 0 to {int(label[2]) - 1}: give it more "
        "outputs, or let labels count from 0"
    )


def exit_code(error: BaseException) -> int:
    """The exit code of an exception: its own if it has one, 75 where a retry can help, else 70."""
    if isinstance(error, LauncherError):
        return error.exit_code
    return EXIT_RETRY if is_machine_failure(error) or is_peer_failure(error) else EXIT_FAILED


def is_machine_failure(error: BaseException) -> bool:
    """Whether a disk or the network failed, which may pass, rather than that a file is missing or forbidden."""
    original = unwrap(error)
    if isinstance(original, ConnectionError | TimeoutError) or _absent(original):
        return True
    return isinstance(original, OSError) and original.errno in _PASSING


def _absent(error: Any) -> str | None:
    """The file that a disk or a mount did not give, also where somebody took that for a mistake of the user's."""
    if isinstance(error, OSError) and error.errno in _ABSENT:
        return f"{error.filename or 'a file (LAUNCHER_TRACEBACK=1 shows where it is read)'}: {error.strerror}"
    if _is_op_error(error) and (found := _OF_A_FILE.search(error.message)):
        return found[1]
    if not isinstance(error, UsageError):
        return None
    around: list[Any] = [error.__cause__ or error.__context__]
    for path in _PATH.findall(str(error)):
        try:
            os.stat(path)
        except OSError as one:
            around.append(one)
    whys = [why for one in around if (why := _absent(one))]
    return f"{error} ({whys[0]})" if whys else None


def _is_op_error(error: BaseException) -> bool:
    if "tensorflow" not in sys.modules:
        return False
    import tensorflow as tf  # so late because main has to start without it

    return isinstance(error, tf.errors.OpError)


def is_peer_failure(error: BaseException) -> bool:
    """Whether TensorFlow or this program says that another process went away, or came back without what it knew."""
    if isinstance(error, PeerError):
        return True
    if not _is_op_error(error):
        return False
    import tensorflow as tf

    gone = tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError
    # The work of one host is cancelled where that of another ends; this program cancels none.
    if isinstance(error, gone | tf.errors.CancelledError):
        return True
    return any(words in str(error).lower() for words in _RESTARTED)


def unwrap(error: BaseException) -> BaseException:
    """The exception that was raised, where gin (0.5.0) replaced it by a proxy with a longer message, once or more."""
    while "ExceptionProxy" in ((method := type(error).__str__).__qualname__ or ""):  # JAX's has none
        original = inspect.getclosurevars(method).nonlocals.get("exception")
        if not isinstance(original, BaseException):
            break
        error = original
    return error
