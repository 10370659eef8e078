#!/usr/bin/env bash
# What only a card can show, on one NVIDIA GPU, in about ten minutes: benchmarks/gpu_check.py says what.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/gpu_check.sh [--dry_run] [--rehearse] [--out=FILE] [--seconds=N] [--cases=A,B] [--engine=ENGINE]

Trains small and real steps on this machine's first GPU and compares them with TensorFlow's on the CPU, with JAX and
PyTorch by hand, and with what was forecast. Needs no network. What it found is in FILE, as JSON, case by case.

  --out=FILE       default: gpu_check.json
  --seconds=N      for all cases (default: 600)
  --cases=A,B      some of them; python benchmarks/gpu_check.py --help says which there are
  --engine=ENGINE  pjrt (default), or tensorflow with its own CUDA build
  --keep=FOLDER    also keeps there what the runs print
  --rehearse       on CPUs that play a GPU, in small sizes: the first case that fails ends it
  --dry_run        print what would run, run nothing
  --help           show this text

Environment: PYTHON, the interpreter (default: .venv's beside the checkout, else python3).
TEXT
}

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
default_python="$root/.venv/bin/python"
[[ -x "$default_python" ]] || default_python=python3
command=("${PYTHON:-$default_python}" "$root/benchmarks/gpu_check.py")
dry_run=""
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --rehearse | --out=* | --seconds=* | --cases=* | --engine=* | --keep=*) command+=("$1") ;;
    *) printf 'error: unexpected argument %q; --help shows more\n' "$1" >&2 && exit 64 ;;
  esac
  shift
done
if [[ -n "$dry_run" ]]; then
  printf '%q ' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
