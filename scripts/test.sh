#!/usr/bin/env bash
# From a fresh clone to a verdict: sets up, lints, checks types, runs the suite.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/test.sh [--dry_run] [--fast] [PYTEST_ARGUMENT ...]

Makes .venv, installs Launcher with what its tests need, then runs ruff and shellcheck, and beside each other mypy and
pytest. PYTEST_ARGUMENTs narrow the suite: scripts/test.sh tests/config. Tests marked nightly, which repeat another in
one more size, are left out; scripts/test.sh -m '' runs them, too.

  --fast      leave out what starts several processes, traces or compiles for long: a minute or two on two cores
  --dry_run   print what would run, run nothing
  --help      show this text

Environment: VENV and PYTHON, see scripts/install.sh --help; WORKERS, the number of test processes (default 3).
TEXT
}

run() {
  if [[ -n "$dry_run" ]]; then
    local line
    printf -v line ' %q' "$@"
    printf '+%s\n' "$line" # at once, as another line may be printed beside it
  else
    "$@"
  fi
}

dry_run=""
fast=""
arguments=()
for argument in "$@"; do
  case "$argument" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --fast) fast=1 ;;
    *) arguments+=("$argument") ;;
  esac
done

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-$root/.venv}/bin"
[[ "$bin" == /* ]] || bin="$PWD/$bin"
"$root/scripts/install.sh" ${dry_run:+--dry_run} test

if [[ -n "$dry_run" ]]; then exec {unread}>&1; else exec {unread}>/dev/null; fi

cd -- "$root"
export TF_CPP_MIN_LOG_LEVEL=2
unset PYTHONDONTWRITEBYTECODE # else each of the many processes that tests start compiles Launcher anew
# What git tracks: a program of one's own in the checkout, such as the README's, is none of the suite's.
mapfile -t tracked < <(git ls-files '*.py' '*.ipynb' 2>/dev/null)
((${#tracked[@]})) || tracked=(.)
run "$bin/ruff" check --force-exclude "${tracked[@]}"
run "$bin/ruff" format --check --force-exclude "${tracked[@]}"
run "$bin/shellcheck" scripts/*.sh scripts/*.bash scripts/slurm.sbatch .ci/run
run "$bin/shellcheck" --shell=bash completions/bash/*
# Beside all that follows, of which much waits for processes that it starts.
run "$bin/mypy" &
types=$!
# The bytecode of all tests, which each of pytest's processes would else make for itself.
run "$bin/python" -m pytest --collect-only -qq >&"$unread" 2>&1 || true # it fails again below, and says why
if [[ -n "$fast" ]]; then
  arguments=(-m "not heavy and not slow and not nightly" "${arguments[@]}")
elif ! { run "$bin/python" -m launcher.data.prepare fashion_mnist ||
  run "$bin/python" -m launcher.gin_configs.data fashion_mnist; }; then
  printf 'note: Fashion-MNIST is not to be had here; the tests that need it will be skipped\n'
fi
# Three on two cores: tests of jobs mostly wait for the processes they start. worksteal: tests of one file stay together,
# so that what they share is built once.
code=0
run "$bin/python" -m pytest -n "${WORKERS:-3}" --dist worksteal "${arguments[@]}" || code=$?
wait "$types" || { code=$? && printf 'error: mypy has found what it says above\n' >&2; }
exit "$code"
