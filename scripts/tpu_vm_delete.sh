#!/usr/bin/env bash
# Deletes a Cloud TPU node and the queued resource it came from, in the one order that works.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/tpu_vm_delete.sh [--dry_run] [--yes] [--force] --node=NAME [OPTION ...]

Deletes the Cloud TPU node NAME with its disks. If it came from a queued resource, that follows: the node is deleted,
the queued resource becomes SUSPENDED, and then it can be deleted. Run again, it goes on or says that all is gone.

  --queued_resource=ID   default: the one the node names, else the one called NAME
  --zone=ZONE, --project=PROJECT   default: those gcloud is set to
  --wait=SECONDS         for the queued resource to become SUSPENDED (default: 600)
  --force                leaves the order to the service, which also deletes a queued resource that still provisions
  --yes                  do not ask
  --dry_run              print the commands, run nothing
  --help                 show this text

Exit codes: 0 all is gone; 1 you said no; 64 a mistake; 75 the queued resource is still there, try again.
TEXT
}

folder="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=/dev/null
source "$folder/tpu_types.bash"

node="" queued="" zone="" project="" force="" yes="" wait_seconds=600
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --yes) yes=1 ;;
    --force) force=1 ;;
    --node=*) node="${1#*=}" ;;
    --queued_resource=*) queued="${1#*=}" && need_name --queued_resource "$queued" ;;
    --zone=*) zone="${1#*=}" && need_place --zone "$zone" ;;
    --project=*) project="${1#*=}" && need_place --project "$project" ;;
    --wait=*) wait_seconds="${1#*=}" && need_seconds --wait "$wait_seconds" ;;
    *) fail "unknown option $1; --help shows what there is" ;;
  esac
  shift
done
[[ -n "$node" ]] || fail "--node is missing: which node is to be deleted?"
need_name --node "$node"
need_gcloud
[[ -z "$zone" ]] || place+=("--zone=$zone")
[[ -z "$project" ]] || place+=("--project=$project")

describe_node=(gcloud compute tpus tpu-vm describe "$node" "${place[@]}" '--format=value(queuedResource.basename())')
delete_node=(gcloud compute tpus tpu-vm delete "$node" "${place[@]}" --quiet)

# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources/delete: without force, only one
# that is ACCEPTED (today WAITING_FOR_RESOURCES), FAILED or SUSPENDED is deleted.
wait_until_deletable() {
  local deadline=$((SECONDS + wait_seconds)) pause=1 state status
  while true; do
    status=0
    state="$(queued_state "$queued")" || status="$?"
    ((status != 1)) || return 1
    ((status == 0)) || exit 75
    case "$state" in
      SUSPENDED | FAILED | ACCEPTED | WAITING_FOR_RESOURCES) return 0 ;;
    esac
    ((SECONDS < deadline)) || try_later "the queued resource $queued is still $state after $wait_seconds s: try again, or with --force"
    sleep "$pause"
    pause=$((pause < 8 ? 2 * pause : 10))
  done
}

delete_queued() {
  run gcloud compute tpus queued-resources delete "$queued" "${place[@]}" ${force:+--force} --quiet
}

if [[ -n "$dry_run" ]]; then
  show "${describe_node[@]}"
  queued="${queued:-$node}"
  printf '# as far as there is a queued resource %s, or the node names another:\n' "$queued"
  [[ -n "$force" ]] || run "${delete_node[@]}"
  [[ -n "$force" ]] ||
    show gcloud compute tpus queued-resources describe "$queued" "${place[@]}" '--format=value(state.state)'
  [[ -n "$force" ]] || printf '# again until it says SUSPENDED\n'
  delete_queued
  exit 0
fi

status=0
named="$(ask "${describe_node[@]}")" || status="$?"
((status <= 1)) || fail "gcloud cannot say whether $node exists; its words are above"
has_node=$((status == 0))
queued="${queued:-${named:-$node}}"
status=0
state="$(queued_state "$queued")" || status="$?"
((status <= 1)) || fail "gcloud cannot say whether the queued resource $queued exists; its words are above"
has_queued=$((status == 0))

what=""
((!has_node)) || what="the node $node with its disks"
((!has_queued)) || what="${what:+$what and }the queued resource $queued ($state)"
if [[ -z "$what" ]]; then
  say "there is no node $node, and no queued resource $queued: nothing to delete"
  exit 0
fi
if [[ -z "$yes" ]]; then
  printf 'Delete %s? [y/N] ' "$what" >&2
  read -r answer || fail "nobody answered; say --yes to delete without asking"
  if [[ ! "$answer" =~ ^[Yy]([Ee][Ss])?$ ]]; then
    say "kept"
    exit 1
  fi
fi

if ((has_node)) && { [[ -z "$force" ]] || ((!has_queued)); }; then
  "${delete_node[@]}"
fi
if ((has_queued)); then
  if [[ -n "$force" ]] || wait_until_deletable; then
    delete_queued
  fi
fi
say "deleted $what"
