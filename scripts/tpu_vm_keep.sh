#!/usr/bin/env bash
# Keeps a Cloud TPU node there, in one zone or another, until the run that it trains by itself has ended.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/tpu_vm_keep.sh [--dry_run] --node=NAME --zones=ZONE[,ZONE ...] --save_to=gs://... [OPTION ...] -- FLAG ...

Creates the node by scripts/tpu_vm_create.sh, in the first of the zones that has room, and looks at it again and again: what
was preempted, failed or was suspended is deleted and made anew, here or in the next zone, and the run goes on from what is
in --save_to. When summary.json there says that the run has ended, the node is deleted.

  --zones=ZONE,...    tried in this order
  --save_to=gs://...  where the run's files are kept
  --every=SECONDS     between looks (default: 300)
  --dry_run           print the commands, run nothing
  --help              show this text

OPTIONs are those of scripts/tpu_vm_create.sh, such as --type, --source, --spot and --queued. With --queued, each of several
zones has --wait=SECONDS (default: 1800) to give the node; then its request is deleted, and the next zone is asked.
FLAGs are of launcher.main.

Exit codes: 0 the run is done; 64 a mistake, or the run's; 70 the run has failed; 130, 143 stopped: the node stays as it is.
TEXT
}

folder="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=/dev/null
source "$folder/tpu_types.bash"

node="" zones=() save_to="" every=300 queued="" waits="" project=() options=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --zones=*) IFS=, read -ra zones <<<"${1#*=}" ;;
    --every=*) every="${1#*=}" && need_seconds --every "$every" ;;
    --zone=* | --recreate) fail "$1: leave it out; --zones says where, and what is lost is always made anew" ;;
    --) break ;;
    --*)
      case "$1" in
        --node=*) node="${1#*=}" ;;
        --save_to=*) save_to="${1#*=}" ;;
        --project=*) project=("$1") ;;
        --queued) queued=1 ;;
        --wait=*) waits=1 ;;
      esac
      options+=("$1")
      ;;
    *) fail "unknown option $1; flags of launcher.main stand behind --, and --help shows the rest" ;;
  esac
  shift
done
[[ -n "$node" ]] || fail "--node is missing: how is the node to be called?"
((${#zones[@]})) || fail "--zones is missing: in which zones may the node be, such as --zones=us-west4-a,us-west1-c?"
for zone in "${zones[@]}"; do need_place --zones "$zone"; done
[[ -n "$save_to" ]] || fail "--save_to is missing: where is the run kept while there is no node?"
[[ -z "$queued" || -n "$waits" ]] || ((${#zones[@]} == 1)) || options+=(--wait=1800)
need_gcloud

create() { "$folder/tpu_vm_create.sh" ${dry_run:+--dry_run} --recreate "--zone=$1" "${options[@]}" "${@:2}"; }

delete() { run "$folder/tpu_vm_delete.sh" --yes "--node=$node" "--zone=$1" "${project[@]}"; }

# summary.json of the run, and nothing where there is none yet; fails where the bucket does not answer.
summary() { ask gcloud storage cat "$save_to/summary.json" || (($? == 1)); }

# exit_code_of SUMMARY: 0 of a run that is done, 64 or 70 of one that a restart would not mend, else nothing.
exit_code_of() {
  local code
  code="$(sed -nE 's/.*"exit_code": *([0-9]+).*/\1/p' <<<"$1" | head -n 1)"
  [[ "$code" != 0 || "$1" == *'"completed"'* ]] || return 0
  case "$code" in 0 | 64 | 70) echo "$code" ;; esac
}

if [[ -n "$dry_run" ]]; then
  show gcloud storage cat "$save_to/summary.json"
  for zone in "${zones[@]}"; do
    create "$zone" "$@"
    delete "$zone"
  done
  exit 0
fi
stopped() {
  [[ -z "$pause" ]] || kill "$pause" 2>/dev/null || true
  say "stopped: $node stays as it is; delete it with scripts/tpu_vm_delete.sh"
  exit "$1"
}
pause=""
trap 'stopped 130' INT
trap 'stopped 143' TERM

before="$(summary)" || fail "gcloud cannot read $save_to; its words are above" # of an earlier run in this folder: a failure that may have been mended since
if [[ "$(exit_code_of "$before")" == 0 ]]; then
  say "$save_to has a run that is done" && exit 0
fi
at=""
for zone in "${zones[@]}"; do # where an earlier call has made it
  # shellcheck disable=SC2034 # for node_state and queued_state
  place=("--zone=$zone" "${project[@]}") status=0
  node_state "$node" >/dev/null || status="$?"
  if ((status == 1)); then status=0 && queued_state "$node" >/dev/null || status="$?"; fi
  ((status <= 1)) || fail "gcloud cannot say whether $node exists; its words are above"
  if ((status == 0)); then at="$zone" && break; fi
done
while true; do
  now="$(summary)" || now="$before"
  if [[ -n "$at" && "$now" != "$before" ]] && code="$(exit_code_of "$now")" && [[ -n "$code" ]]; then
    say "the run has ended with $code: deleting $node; its files are in $save_to"
    delete "$at" || say "note: $node could not be deleted, and is paid for: scripts/tpu_vm_delete.sh --node=$node --zone=$at"
    exit "$code"
  fi
  for zone in ${at:-"${zones[@]}"}; do
    status=0 at=""
    create "$zone" "$@" || status="$?"
    case "$status" in
      0) at="$zone" && break ;;
      64) exit 64 ;;
      *) say "$zone does not give $node now (exit code $status)" ;;
    esac
    # Two requests might be granted at once.
    if [[ -n "$queued" ]] && ((${#zones[@]} > 1)); then delete "$zone" || true; fi
  done
  # A trap is run at once in `wait`, but for a signal that comes just before it: that waits for one of these.
  for ((left = every; left >= 0; left -= 5)); do
    sleep "$((left < 5 ? left : 5))" &
    pause="$!"
    wait "$pause"
  done
done
