"""Whose failure an exception was decides the exit code, and with it whether a supervisor starts the run again."""

from __future__ import annotations

import errno
import os

import pytest
import tensorflow as tf

from launcher import launch
from launcher.config import gin_files
from launcher.data import files
from launcher.data.images import folder_images
from launcher.errors import MachineError, PeerError, Preempted, TrainingError, UsageError, failures
from launcher.run import programs

# What TensorFlow 2.21 said when a worker that another program drove was killed, or had been started anew.
LOST_HOSTS = [
    tf.errors.UnavailableError(None, None, "recvmsg:Connection reset by peer"),
    tf.errors.UnavailableError(None, None, "Socket closed"),
    tf.errors.AbortedError(None, None, "Session 5f is not found. Possibly, this worker just restarted."),
    tf.errors.DeadlineExceededError(None, None, "Deadline Exceeded"),
    tf.errors.CancelledError(None, None, "RecvAsync is cancelled"),
    tf.errors.InvalidArgumentError(
        None,
        None,
        "Unable to find a context_id matching the specified one (17). Perhaps the worker was restarted, or the context "
        "was GC'd?",
    ),
    tf.errors.InvalidArgumentError(None, None, "Unable to find the relevant tensor remote_handle: Op ID: 4, Output: 0"),
    tf.errors.InvalidArgumentError(None, None, "/job:worker/replica:0/task:1/device:TPU:0 unknown device."),
    # tensorflow/core/common_runtime/eager/tensor_handle.cc, where a value's host was lost before it was asked for
    tf.errors.InternalError(None, None, "Remote address looked up from remote data found to be poisoned"),
    tf.errors.NotFoundError(
        None, None, "'__inference_f_7' is neither a type of a primitive operation nor a name of a function registered"
    ),
]


@pytest.mark.parametrize("error", LOST_HOSTS, ids=lambda error: error.message[:40])
def test_a_host_that_is_lost_or_came_back_empty_is_worth_a_retry(error):
    assert failures.is_peer_failure(error)
    assert failures.exit_code(error) == 75


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 64),
        (TrainingError("x"), 70),
        (Preempted("x"), 42),
        (PeerError("x"), 75),
        (OSError(errno.EIO, "x"), 75),
        (OSError(errno.ENOENT, "x"), 70),
        (OSError(errno.ENOTCONN, "x"), 75),
        (OSError(errno.EROFS, "x"), 70),
        (ConnectionResetError("x"), 75),
        (tf.errors.UnknownError(None, None, "{{node R}} /mnt/a-1; Stale file handle"), 75),
        (tf.errors.NotFoundError(None, None, "/mnt/a-1; No such device [Op:ReadFile]"), 75),
        (tf.errors.UnknownError(None, None, "OSError: [Errno 5] Input/output error: '/mnt/a'"), 75),
        (tf.errors.InvalidArgumentError(None, None, "shapes [2] and [3]"), 70),
        (tf.errors.ResourceExhaustedError(None, None, "out of memory on /job:worker/replica:0/task:1"), 70),
        (tf.errors.InternalError(None, None, "x"), 70),
        (tf.errors.NotFoundError(None, None, "no such file"), 70),
        (ValueError("Unable to find the relevant tensor remote_handle"), 70),
        (KeyboardInterrupt(), 70),
    ],
)
def test_other_failures_keep_their_code(error, code):
    assert failures.exit_code(error) == code


def dies(*_, **__):
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), "/mnt/a")


def test_a_mistake_that_was_seen_where_a_mount_is_dead_is_none():
    with pytest.raises(UsageError) as raised:
        try:
            dies()
        except Exception as error:
            raise UsageError(f"no example ({type(error).__name__})") from None
    told = failures.explained(raised.value)
    assert isinstance(told, MachineError) and told.exit_code == 75 and "no example (OSError)" in str(told)


@pytest.mark.parametrize(
    "look",
    [
        lambda: files.matching("/mnt/a", "x.y"),
        lambda: gin_files.find_file("/mnt/a"),
        lambda: programs.split(["/mnt/a.py"]),
        lambda: folder_images.folder_images("/mnt/a"),
    ],
)
def test_nothing_is_called_missing_on_a_mount_that_is_dead(look, monkeypatch):
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: dies() if str(path).startswith("/mnt/a") else stat(path, **how))
    with pytest.raises(UsageError) as raised:
        look()
    assert failures.exit_code(failures.explained(raised.value)) == 75 and "/mnt/a" in str(raised.value)


@pytest.mark.parametrize(("broken", "code"), [(dies, 75), (None, 70)])
def test_the_supervisor_ends_with_a_code_whatever_is_raised(broken, code, monkeypatch, capsys):
    monkeypatch.setattr(launch, "make_job", broken)
    assert launch.main(["launch", "--gin_file=resnet_cpu.gin"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 70)
