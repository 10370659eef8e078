#!/usr/bin/env bash
# Runs one recipe on two worker processes of this machine, as two hosts would: same command, own TF_CONFIG.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/two_workers.sh [--dry_run] FLAG ...

Every FLAG goes to launcher.main on both workers, such as
    scripts/two_workers.sh --gin_file=resnet_cpu.gin --model_dir=runs/two_workers
Worker 0, the chief, prints here; worker 1 prints its errors. When one fails, the other is stopped.

  --dry_run   print what would run, run nothing
  --help      show this text

Environment:
  PYTHON   the interpreter (default: .venv's beside the checkout, else python3)
  PORT     port of worker 0 on the loopback interface; worker 1 takes the next (default: 12345)
TEXT
}

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
default_python="$root/.venv/bin/python"
[[ -x "$default_python" ]] || default_python=python3
python="${PYTHON:-$default_python}"
port="${PORT:-12345}"
dry_run=""
flags=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    *) flags+=("$1") ;;
  esac
  shift
done
((${#flags[@]})) || { printf 'error: name a recipe, such as --gin_file=resnet_cpu.gin; --help shows more\n' >&2 && exit 64; }

config() {
  printf '{"cluster": {"worker": ["127.0.0.1:%d", "127.0.0.1:%d"]}, "task": {"type": "worker", "index": %d}}' \
    "$port" "$((port + 1))" "$1"
}

if [[ -n "$dry_run" ]]; then
  for index in 0 1; do
    printf 'TF_CONFIG=%q %q -m launcher.main' "$(config "$index")" "$python"
    printf ' %q' "${flags[@]}"
    printf '\n'
  done
  exit 0
fi

workers=()
trap 'kill "${workers[@]}" 2>/dev/null || true' EXIT
for index in 0 1; do
  TF_CONFIG="$(config "$index")" "$python" -m launcher.main "${flags[@]}" &
  workers+=("$!")
done
status=0
for _ in 0 1; do
  wait -n || { status=$? && break; }
done
exit "$status"
