#!/usr/bin/env bash
# TensorFlow: one := anywhere in a function, and AutoGraph converts none of its loops and conditions.
#
# tf.function turns `if`, `while` and `for` over tensors into graph operations by AutoGraph, a function at a time. An assignment expression,
# in Python since 3.8, is not known to it, wherever in the function it stands and whatever it is about: the function is then run as it
# is, after a warning that asks for a report and shows a syntax tree, and its first condition on a tensor ends in "Using a symbolic tf.Tensor
# as a Python bool is not allowed", with advice about eager execution and none about the walrus. Functions that have no such condition work
# on, with the warning in the log of each process. What helps: the assignment in a line of its own.
#
# Seen with tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: the same as of the line before.
#
# Output seen:
#   assigned before: 4.0
#   by a walrus in the condition: OperatorNotAllowedInGraphError
#   by a walrus elsewhere, on a Python number: OperatorNotAllowedInGraphError
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0
cat >"$folder/program.py" <<'PY'
import sys

import tensorflow as tf


def before(x):
    y = x + 1
    if y > 0:
        y = y * 2
    return y


def within(x):
    if (y := x + 1) > 0:
        y = y * 2
    return y


def elsewhere(x):
    scale = (two := 2) * 1
    y = x + 1
    if y > 0:
        y = y * scale
    return y


def called(function):
    try:
        return float(tf.function(function)(tf.constant(1.0)))
    except Exception as error:
        return type(error).__name__


seen = [called(one) for one in (before, within, elsewhere)]
print(f"assigned before: {seen[0]}")
print(f"by a walrus in the condition: {seen[1]}")
print(f"by a walrus elsewhere, on a Python number: {seen[2]}")
sys.exit(seen != [4.0, *["OperatorNotAllowedInGraphError"] * 2])
PY
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/program.py"
