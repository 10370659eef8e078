#!/usr/bin/env bash
# A wheel where nothing else is: installed into a new environment, and used as its first user would.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/try_wheel.sh [--dry_run] WHEEL

Makes an environment in a temporary folder, installs WHEEL[cpu,demo] with all that it requires, and there, outside of any
checkout: shows its version, trains the digits for a few steps, goes on with the same run, calls launcher.fit, compares the
runs, and asks the doctor. The first that fails ends it.

  --dry_run   print what would run, run nothing
  --help      show this text

Environment: PYTHON, the interpreter (default python3); EXTRAS (default cpu,demo).
TEXT
}

run() {
  printf '+%s\n' "$(printf ' %q' "$@")"
  [[ -n "$dry_run" ]] || "$@"
}

dry_run=""
wheel=""
for argument in "$@"; do
  case "$argument" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --*) printf 'unknown flag %s; --help shows every flag\n' "$argument" >&2 && exit 64 ;;
    *) wheel="$argument" ;;
  esac
done
[[ -n "$wheel" ]] || { printf 'name the wheel: scripts/try_wheel.sh dist/tf_launcher-VERSION-py3-none-any.whl\n' >&2 && exit 64; }

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
[[ "$wheel" == /* ]] || wheel="$PWD/$wheel"
unset PYTHONPATH
export TF_CPP_MIN_LOG_LEVEL=2
run "${PYTHON:-python3}" -m venv "$folder/env"
run "$folder/env/bin/pip" install --quiet --disable-pip-version-check "${wheel}[${EXTRAS:-cpu,demo}]"

cd -- "$folder"
cat >program.py <<'PYTHON'
import keras
import numpy as np

import launcher


def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
history = launcher.fit(build, (x, y), validation=(x, y), epochs=2, model_dir="fit")
assert launcher.__file__.startswith(__import__("sys").prefix), launcher.__file__
assert launcher.load(history.model_dir).predict(x, verbose=0).shape == (64, 2)
PYTHON
short=(--gin_param='resnet.depth = 8' --gin_param='train.log_every = 5' --model_dir=digits)
run env/bin/launcher --version
run env/bin/launcher --gin_file=resnet_cpu.gin "${short[@]}" --gin_param='train.steps = 10'
run env/bin/launcher --gin_file=resnet_cpu.gin "${short[@]}" --gin_param='train.steps = 20'
run env/bin/python program.py
run env/bin/launcher --mode=compare digits fit
run env/bin/launcher --mode=doctor
run env/bin/launcher-jobs --gin_file=resnet_cpu.gin --workers=2 --dry_run
printf 'the wheel works where nothing else is\n'
