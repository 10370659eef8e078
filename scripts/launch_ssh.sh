#!/usr/bin/env bash
# Runs one recipe on several hosts by ssh, with one supervisor here that watches and restarts them all.
#
# Every host needs what this one has, at the same paths: the checkout (or launcher installed), its .venv, the data, and
# --model_dir on storage that all share. ssh must get there without a password.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/launch_ssh.sh [--dry_run] HOSTS FLAG ...

HOSTS is a,b,c or a file of one host a line (NAME or USER@NAME, then slots=K where it runs K workers).
Every FLAG goes to launcher.launch, which passes on to launcher.main what it does not know, such as
    scripts/launch_ssh.sh a,b --gin_file=resnet_gpu.gin --model_dir=/shared/run
    scripts/launch_ssh.sh hosts.txt --min_workers=2 --gin_file=resnet_gpu.gin --model_dir=/shared/run

  --dry_run   print what would run here and on each host, run nothing
  --help      show this text

Environment:
  PYTHON        the interpreter, here and on the hosts (default: .venv's beside the checkout, else python3)
  SSH_COMMAND   the client with options, such as "ssh -p 2222 -i key" (default: ssh)
TEXT
}

die() {
  printf 'error: %s\n' "$1" >&2
  exit 64
}

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
default_python="$root/.venv/bin/python"
[[ -x "$default_python" ]] || default_python="$(command -v python3)" || die "no python3 here; set PYTHON"
python="${PYTHON:-$default_python}"
ssh_command="${SSH_COMMAND:-ssh}"

dry_run=()
case "${1:-}" in
  --help | -h) usage && exit 0 ;;
  --dry_run) dry_run=(--dry_run) && shift ;;
esac
(($# >= 2)) || die "name the hosts and a recipe, such as a,b --gin_file=resnet_gpu.gin; --help shows more"
case "$1" in
  -*) die "the hosts come first, such as a,b; got $1" ;;
esac
if [[ -f "$1" ]]; then
  hosts=("--hostfile=$1")
else
  hosts=("--hosts=$1")
fi
shift

PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m launcher.launch --backend=ssh "${hosts[@]}" \
  "--ssh_command=$ssh_command" "--remote_python=$python" ${dry_run[@]+"${dry_run[@]}"} "$@"
