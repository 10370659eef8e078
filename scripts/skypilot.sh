#!/usr/bin/env bash
# Prints a task for SkyPilot, which finds machines over clouds and makes those that are lost anew.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/skypilot.sh [--dry_run] --runs=STORE [OPTION ...] -- --gin_file=RECIPE [FLAG ...]

Prints a task of SkyPilot (read by its version 0.14) that trains with launcher.launch and the FLAGs, one worker a node:

    scripts/skypilot.sh --runs=gs://BUCKET --accelerators=H100:8 --nodes=4 --spot -- --gin_file=resnet_gpu.gin >task.yaml
    sky jobs launch task.yaml

It is to be launched in a checkout of Launcher, which SkyPilot copies to the nodes. A job that has saved (42) or that a
retry may help (75) goes on from its last checkpoint on new nodes; 64 and 70 end it.

  --runs=STORE           a bucket such as gs://BUCKET/FOLDER, or the name of a volume of SkyPilot's, for /runs, where
                         the run is kept: --model_dir is /runs/NAME unless the FLAGs name another folder there
  --name=NAME            of the task (default: the recipe's)
  --accelerators=WHAT    as SkyPilot has it, such as H100:8 or tpu-v5litepod-8, a slice of one host (default: none)
  --nodes=N              (default: 1)
  --cloud=CLOUD, --region=REGION   (default: any)
  --spot                 cheaper, and taken away at any time
  --dry_run              the same: nothing is ever started
  --help                 show this text
TEXT
}

die() {
  printf 'error: %s\n' "$1" >&2
  exit 64
}

# A value that YAML reads as it stands.
plain() {
  [[ "$2" =~ ^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$ ]] || die "$1=$2: use letters, digits, dots, dashes and slashes"
}

runs="" name="" accelerators="" nodes=1 spot="" place=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) ;;
    --runs=*) runs="${1#*=}" && plain --runs "$runs" ;;
    --name=*) name="${1#*=}" ;;
    --accelerators=*) accelerators="${1#*=}" && plain --accelerators "$accelerators" ;;
    --nodes=*) nodes="${1#*=}" && [[ "$nodes" =~ ^[1-9][0-9]{0,3}$ ]] || die "$1: give a whole number, such as 4" ;;
    --cloud=* | --region=*) plain "${1%%=*}" "${1#*=}" && place+=("${1#--}") ;;
    --spot) spot=1 ;;
    --) shift && break ;;
    *) die "unknown option $1; flags of launcher.launch stand behind --, and --help shows the rest" ;;
  esac
  shift
done
[[ -n "$runs" ]] || die "--runs is missing: name a bucket, such as gs://BUCKET, or a volume of SkyPilot's, for what the run writes"

recipe="" model_dir=""
for ((index = 1; index <= $#; index++)); do
  flag="${!index}" next=$((index + 1))
  [[ "$flag" != *$'\n'* ]] || die "a FLAG has a line break: $flag"
  [[ "$flag" == *=* ]] || flag+="=${!next:-}"
  case "${flag#-}" in
    -gin_file=*) recipe="$(basename -- "${flag#*=}")" ;;
    -model_dir=*) model_dir="${flag#*=}" ;;
    -backend=* | -workers=*) die "${flag%%=*}: --nodes says how many workers there are, one a node; leave it out" ;;
  esac
done
[[ -n "$recipe" ]] || die "no --gin_file behind --: which recipe?"
name="${name:-$(tr -c '[:alnum:]\n' - <<<"${recipe%.*}")}"
[[ "$name" =~ ^[A-Za-z]([-A-Za-z0-9]*[A-Za-z0-9])?$ ]] || die "--name=$name: use letters, digits and dashes, beginning with a letter"
[[ "${model_dir:-/runs/$name}" == /runs/?* ]] || die "--model_dir=$model_dir: only /runs outlives the nodes; name a folder in it"
[[ -n "$model_dir" ]] || set -- "$@" "--model_dir=/runs/$name"
extra=cpu
case "$accelerators" in
  "") ;;
  tpu-*)
    ((nodes == 1)) || die "--nodes=$nodes with $accelerators: one program drives a slice of one host; see scripts/tpu_vm_keep.sh for more"
    extra=tpu && set -- --tpu=local "$@"
    ;;
  *) extra=cuda ;;
esac

cat <<YAML
name: $name
num_nodes: $nodes
workdir: .
resources:
YAML
[[ -z "$accelerators" ]] || printf '  accelerators: %s\n' "$accelerators"
[[ -z "$spot" ]] || printf '  use_spot: true\n'
for one in ${place[@]+"${place[@]}"}; do printf '  %s: %s\n' "${one%%=*}" "${one#*=}"; done
printf '  job_recovery:\n    recover_on_exit_codes: [42, 75]\n'
case "$runs" in
  *://*) printf 'file_mounts:\n  /runs:\n    source: %s\n    mode: MOUNT\n' "$runs" ;;
  *) printf 'volumes:\n  /runs: %s\n' "$runs" ;;
esac
cat <<YAML
setup: |
  scripts/install.sh $extra,demo,text
run: |
YAML
# What runs on each node, where SkyPilot sets the variables; a port for each worker lets several share a host.
cat <<'YAML'
  if ((SKYPILOT_NUM_NODES > 1)); then
    addresses="" port=2222
    while read -r address; do
      addresses+="${addresses:+, }\"$address:$port\""
      port=$((port + 1))
    done <<<"$SKYPILOT_NODE_IPS"
    export TF_CONFIG="{\"cluster\": {\"worker\": [$addresses]}, \"task\": {\"type\": \"worker\", \"index\": $SKYPILOT_NODE_RANK}}"
    set -- --backend=member --start_timeout=3600
  fi
YAML
printf '  exec .venv/bin/python -m launcher.launch "$@"'
printf ' %q' "$@"
printf '\n'
