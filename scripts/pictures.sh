#!/usr/bin/env bash
# Makes the pictures of the documentation again, from real runs on this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/pictures.sh [--dry_run] [--all=DIR]

Trains the quickstart on a pseudo-terminal and writes docs/pictures/report.png and docs/pictures/terminal.png, by
headless Chromium. Takes about a minute on two cores.

  --all=DIR   also a translation, a job killed twice, a run that failed, a comparison, the dark page and its print,
              into DIR; about ten minutes more
  --dry_run   print what would run, run nothing
  --help      show this text

Environment: PYTHON, an interpreter with Launcher, its extra "test" and Pillow (default: .venv/bin/python, or python3).
TEXT
}

all=""
shown=""
dry_run=""
for argument in "$@"; do
  case "$argument" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --all=*) all="${argument#*=}" ;;
    *) printf 'error: %s is unknown; --help shows what there is\n' "$argument" >&2 && exit 64 ;;
  esac
done

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -x "$python" ]] || python="$(command -v python3)"
PATH="$(dirname -- "$python"):$PATH"
export PATH PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[[ -z "$all" || "$all" == /* ]] || all="$PWD/$all"

run() {
  if [[ -n "$dry_run" ]]; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}
pictures() { run "$python" "$root/scripts/pictures.py" "$@"; }
# terminal NAME COLUMNS COMMAND...: runs it on a terminal, and takes a picture of what is left on the screen.
terminal() {
  local name="$1" columns="$2"
  shift 2
  pictures terminal "--columns=$columns" ${shown:+"--shown=$shown"} "$folder/$name.html" -- "$@" || printf '%s: exit code %s\n' "$name" "$?" >&2
  pictures shoot "$folder/$name.html" "$target/$name.png" "--width=$((columns * 843 / 100 + 48))"
}

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
cd -- "$folder"
target="$root/docs/pictures"
run mkdir -p "$target"
terminal terminal 110 python -m launcher.main --gin_file=resnet_cpu.gin --model_dir=runs/quickstart
pictures shoot runs/quickstart/report.html "$target/report.png" --height=1060 --colors=64
[[ -n "$all" ]] || exit 0

target="$all"
run mkdir -p "$target"
terminal terminal_60 60 python -m launcher.main --gin_file=resnet_cpu.gin --gin_param='cosine.peak = 0.02' --model_dir=runs/slow
pictures shoot runs/quickstart/report.html "$target/quickstart.png"
pictures shoot runs/quickstart/report.html "$target/quickstart_dark.png" --dark
pictures shoot runs/quickstart/report.html "$target/quickstart_print.pdf"
run python -m launcher.main --mode=compare runs/quickstart runs/slow --model_dir=runs
pictures shoot runs/compare.html "$target/comparison.png"
terminal terminal_translation 110 python -m launcher.main --gin_file=transformer_cpu.gin --gin_param='train.steps = 300' \
  --gin_param='train.evaluate_every = 100' --model_dir=runs/translation
pictures shoot runs/translation/report.html "$target/translation.png"
killed=(python -m launcher.launch --workers=2 --gin_file=resnet_cpu.gin --gin_param='train.checkpoint_every = 50')
killed+=(--model_dir=runs/killed)
shown="${killed[*]@Q}"
terminal terminal_killed 110 python "$root/scripts/pictures.py" kill runs/killed 60,140 -- "${killed[@]}"
shown=""
pictures shoot runs/killed/report.html "$target/killed_twice.png"
terminal terminal_failed 110 python -m launcher.main --gin_file=resnet_cpu.gin --gin_param='cosine.peak = 1e30' --model_dir=runs/failed
pictures shoot runs/failed/report.html "$target/failed.png"
