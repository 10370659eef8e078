#!/usr/bin/env bash
# From a fresh clone to a trained ResNet: sets up, trains on scanned digits, says how good it is.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/quickstart.sh [--dry_run] [FLAG ...]

Makes .venv, installs Launcher for this machine's NVIDIA GPUs or else its CPU, trains the ResNet of resnet_cpu.gin on scanned digits, and prints
the accuracy on held-out ones. Run again, it goes on where it stopped, or says that all is done.
Every FLAG goes to launcher.main, such as --replicas=2 or --gin_param='train.epochs = 5'.

  --model_dir=DIR   where the results go (default: runs/quickstart in the checkout)
  --dry_run         print what would run, run nothing
  --help            show this text

Environment: VENV and PYTHON, see scripts/install.sh --help; EXTRAS, what is installed (default: auto,demo), such as
EXTRAS=cpu,demo on a machine with GPUs.
TEXT
}

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
model_dir="$root/runs/quickstart"
dry_run=()
flags=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=(--dry_run) ;;
    --model_dir=*) model_dir="${1#*=}" ;;
    --model_dir)
      (($# > 1)) || { printf 'error: --model_dir needs a folder\n' >&2 && exit 64; }
      model_dir="$2"
      shift
      ;;
    *) flags+=("$1") ;;
  esac
  shift
done
[[ "$model_dir" == /* ]] || model_dir="$PWD/$model_dir"
python="${VENV:-$root/.venv}/bin/python"
[[ "$python" == /* ]] || python="$PWD/$python"
train=("$python" -m launcher.main --gin_file=resnet_cpu.gin "--model_dir=$model_dir" "${flags[@]}")

if [[ ${#dry_run[@]} -eq 0 ]]; then
  printf 'Setting up %s; the first time, this downloads TensorFlow.\n' "${python%/bin/python}"
fi
"$root/scripts/install.sh" "${dry_run[@]}" "${EXTRAS:-auto,demo}"
if [[ ${#dry_run[@]} -ne 0 ]]; then
  printf '+ cd %q\n+' "$root"
  printf ' %q' "${train[@]}"
  printf '\n'
  exit 0
fi

cd -- "$root"
"${train[@]}"
"$python" - "$model_dir" <<'PYTHON'
import json
import sys

model_dir = sys.argv[1]
with open(f"{model_dir}/summary.json", encoding="utf-8") as file:
    summary = json.load(file)
accuracy = summary.get("metrics", {}).get("eval", {}).get("accuracy")
print()
print(f"Test accuracy: {100 * accuracy:.2f}%" if accuracy is not None else "Not evaluated.")
print(f"Results:       {model_dir} (summary.json, metrics.jsonl, config.gin, checkpoints/, tensorboard/)")
PYTHON
printf 'Next:          cd %q && source %q   # then README.md, "Your own model"\n' "$root" "${python%python}activate"
