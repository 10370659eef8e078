#!/usr/bin/env bash
# TensorFlow: a checkpoint saved in a folder named run[1] cannot be restored, and not every part of TensorFlow says so.
#
# Saving takes the name as it is. Reading takes it for a glob pattern, in which [1] stands for 1: `restore` and `tf.saved_model.load` end
# with "Failed to find any matching files", `tf.train.latest_checkpoint` logs an error and returns None, as for an empty folder, so a
# program that resumes if there is a checkpoint begins anew. `CheckpointManager.latest_checkpoint` gives the path, by its own notes.
# Names of runs by their settings, such as layers=[64,32], lead there; `lr=0.1` is read as it is.
#
# Seen with tensorflow-cpu 2.21.0, keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28.
# Expected: that a path that `save` returns is one that `restore` takes.
#
# Output seen:
#   lr=0.1: restore ok; latest_checkpoint ok; manager ok; saved_model ok
#   run[1]: restore NotFoundError; latest_checkpoint None; manager ok; saved_model FileNotFoundError
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - "$folder" <<'PY'
import logging
import os
import sys

import tensorflow as tf

tf.get_logger().setLevel(logging.FATAL)


def named(attempt):
    try:
        attempt()
    except (OSError, tf.errors.NotFoundError) as error:
        return type(error).__name__
    return "ok"


seen = []
for name in ("lr=0.1", "run[1]"):
    place = os.path.join(sys.argv[1], name)
    checkpoint = tf.train.Checkpoint(value=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(checkpoint, place, max_to_keep=1)
    path = manager.save()
    tf.saved_model.save(checkpoint, os.path.join(place, "saved"))
    found = (
        named(lambda: checkpoint.restore(path).assert_consumed()),
        "ok" if tf.train.latest_checkpoint(place) == path else str(tf.train.latest_checkpoint(place)),
        "ok" if manager.latest_checkpoint == path else str(manager.latest_checkpoint),
        named(lambda: tf.saved_model.load(os.path.join(place, "saved"))),
    )
    parts = zip(("restore", "latest_checkpoint", "manager", "saved_model"), found)
    print(f"{name}: " + "; ".join(f"{part} {what}" for part, what in parts))
    seen.append(found)
sys.exit(seen != [("ok",) * 4, ("NotFoundError", "None", "ok", "FileNotFoundError")])
PY
