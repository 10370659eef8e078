#!/usr/bin/env bash
# Creates a Cloud TPU node, at once or through the queue, which may train by itself from its first boot on.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/tpu_vm_create.sh [--dry_run] --node=NAME --type=TYPE [OPTION ...] [-- FLAG ...]

Creates the Cloud TPU node NAME with the accelerator type TYPE, such as v5litepod-16. With --source, every host runs
scripts/tpu_vm_startup.sh at each boot: it installs Launcher and trains with launcher.main and the FLAGs, or goes on
where training stopped. Without, the node is only made: see scripts/tpu_pod_train.sh. Run again, it says how the node is.

  --zone=ZONE, --project=PROJECT   default: those gcloud is set to
  --tf_version=X.Y.Z       an image of this TensorFlow, which the program gets too (default: of the zone's images for TYPE
                           the newest from 2.16 on, for several hosts none that is known to hang, see docs/tpu.md; on
                           one host the program brings the newest TensorFlow, on several that of the image)
  --runtime_version=IMAGE  an image by its whole name
  --engine=pjrt            as the flag of launcher.main, here or behind --: an image without TensorFlow, which is not
                           needed, and every host of the node runs the program (docs/tpu.md)
  --spot                   cheaper, and taken away at any time
  --queued                 waits in the queue of queued resources, under the same name
  --valid_until=DURATION   with --queued: gives up after so long, such as 6h
  --wait=SECONDS           with --queued: waits here until the node is there
  --recreate               a node that was preempted or failed is deleted first
  --source=WHERE           a checkout of Launcher: gs://BUCKET/FOLDER or the URL of a git repository. It is kept in the
                           node's metadata, where whoever may see the node can read a token in it
  --ref=REF                with a git repository: branch, tag or commit (default: HEAD)
  --save_to=gs://...       with --source: where the run's files are kept; what a preempted node leaves for the next one
  --gcloud_flag=FLAG       passed on to gcloud's create, such as --gcloud_flag=--network=NET; may repeat
  --dry_run                print the commands, run nothing
  --help                   show this text

Exit codes: 0 the node is there or under way; 64 a mistake; 75 not there now, try again; else gcloud's own.
TEXT
}

folder="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
tpu_hosts=0 tpu_replicas=0 tensorflow_tpu=() # what is sourced sets them
# shellcheck source=/dev/null
source "$folder/tpu_types.bash"

node="" type="" zone="" project="" tf_version="" image="" queued="" spot="" valid_until="" wait_seconds=""
recreate="" source_url="" ref="" save_to="" engine=""
gcloud_flags=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --node=*) node="${1#*=}" ;;
    --type=*) type="${1#*=}" ;;
    --zone=*) zone="${1#*=}" && need_place --zone "$zone" ;;
    --project=*) project="${1#*=}" && need_place --project "$project" ;;
    --tf_version=*) tf_version="${1#*=}" ;;
    --runtime_version=*) image="${1#*=}" ;;
    --engine=pjrt) engine=pjrt ;;
    --spot) spot=1 ;;
    --queued) queued=1 ;;
    --valid_until=*) valid_until="${1#*=}" ;;
    --wait=*) wait_seconds="${1#*=}" && need_seconds --wait "$wait_seconds" ;;
    --recreate) recreate=1 ;;
    --source=*) source_url="${1#*=}" && need_source --source "$source_url" ;;
    --ref=*) ref="${1#*=}" ;;
    --save_to=*) save_to="${1#*=}" ;;
    --gcloud_flag=*) gcloud_flags+=("${1#*=}") ;;
    --) shift && break ;;
    *) fail "unknown option $1; flags of launcher.main stand behind --, and --help shows the rest" ;;
  esac
  shift
done
[[ -n "$node" ]] || fail "--node is missing: how is the node to be called?"
need_name --node "$node"
[[ -n "$type" ]] || fail "--type is missing: which accelerator type, such as v5litepod-16?"
read_type "$type"
[[ -z "$tf_version" || "$tf_version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "--tf_version=$tf_version: write X.Y.Z, such as 2.20.0"
[[ -z "$image" || "$image" =~ ^[a-z0-9][-a-z0-9.]*$ ]] || fail "--runtime_version=$image: is no name of an image"
if on_every_host "$@"; then
  engine=pjrt
elif [[ -n "$engine" && -n "$source_url" ]]; then
  set -- "$@" --engine=pjrt
fi
if [[ -n "$engine" ]]; then
  [[ -z "$tf_version" ]] || fail "--tf_version=$tf_version: with --engine=pjrt no image has a say in TensorFlow's version"
  image="${image:-$(base_image)}"
  need_free_chips "$image"
elif ((tpu_hosts > 1)) && [[ -n "$image" ]]; then
  [[ "$image" =~ ^tpu-vm-tf-([0-9]+\.[0-9]+\.[0-9]+)-pod- ]] ||
    fail "--runtime_version=$image: $type has $tpu_hosts hosts and needs an image tpu-vm-tf-X.Y.Z-pod-pjrt, whose workers" \
      "the program drives; any other does with --engine=pjrt"
  tf_version="${BASH_REMATCH[1]}" # its workers run it, and so must the program
fi
[[ -z "$tf_version" ]] || need_tensorflow "$tf_version"
[[ -z "$valid_until" || -n "$queued" ]] || fail "--valid_until=$valid_until goes with --queued"
[[ -z "$wait_seconds" || -n "$queued" ]] || fail "--wait=$wait_seconds goes with --queued; without it, gcloud waits anyhow"
[[ -z "$valid_until" || "$valid_until" =~ ^[0-9]+[smhd]$ ]] || fail "--valid_until=$valid_until: write it as in 6h or 30m"
[[ -z "$ref" || "$ref" =~ ^[A-Za-z0-9._][A-Za-z0-9._/-]*$ ]] || fail "--ref=$ref: is no branch, tag or commit"
[[ -z "$save_to" || "$save_to" =~ ^gs://[^/]+/.*[^/]$ ]] || fail "--save_to=$save_to: write gs://BUCKET/FOLDER"
if [[ -z "$source_url" ]]; then
  (($# == 0)) || fail "$1: flags of launcher.main need --source: what is to be installed on the node?"
  [[ -z "$ref" ]] || fail "--ref=$ref goes with --source"
  [[ -z "$save_to" ]] || fail "--save_to=$save_to goes with --source"
else
  [[ "$source_url" != gs://* || -z "$ref" ]] || fail "--ref=$ref: a bucket has no refs; name another folder of it"
  [[ "$source_url" != /* ]] || fail "--source=$source_url: is a folder of this machine, which the node cannot see"
  [[ " $* " == *" --gin_file"* ]] || fail "--source without a recipe: say which behind --, such as -- --gin_file=resnet_tpu.gin"
  (($(printf '%s\n' "$@" | grep -c '') == $#)) || fail "a flag of launcher.main spans several lines"
  for flag in "$@"; do
    [[ "$flag" != -dry_run* && "$flag" != --dry_run* ]] || fail "$flag behind -- would have the node made and nothing trained: write it before --"
  done
  [[ "$source_url $save_to $*" != *"|;|"* ]] || fail "'|;|' cannot stand in a flag"
fi
need_gcloud
[[ -z "$zone" ]] || place+=("--zone=$zone")
[[ -z "$project" ]] || place+=("--project=$project")

# Of the images that the zone has for this slice: the newest, or that of --tf_version; the family's own variant first.
choose_image() {
  local list=(gcloud compute tpus tpu-vm versions list "${place[@]}" '--format=value(version)')
  local known versions version wanted advice left_out=()
  if [[ -n "$dry_run" ]]; then
    show "${list[@]}"
    version="${tf_version:-X.Y.Z}"
    printf '# the image: %s, or else %s' "$(image_variant_of "$version")" "$(image_of "$version")"
    [[ -n "$tf_version" ]] || printf '; the newest from 2.16 on'
    [[ -n "$tf_version" ]] || ((tpu_hosts == 1)) || printf ' that nothing is known against (docs/tpu.md)'
    printf '\n'
    image="<image>"
    return
  fi
  known="$("${list[@]}")"
  versions="$(sed -nE "s/^$(image_of '([0-9]+\.[0-9]+\.[0-9]+)')(-v5e-and-v6|-v5p-and-below)?\$/\1/p" <<<"$known" | sort -ruV)"
  for version in ${tf_version:-$versions}; do
    later "$version" 2.16.0 || continue
    for wanted in "$(image_variant_of "$version")" "$(image_of "$version")"; do
      grep -qx -- "$wanted" <<<"$known" || continue
      if [[ -z "$tf_version" ]] && ((tpu_hosts > 1)) && against_pods_of "$version" >/dev/null; then
        left_out+=("$version")
        break
      fi
      image="$wanted"
      return
    done
  done
  wanted="$(image_of "${tf_version:-X.Y.Z}")"
  if [[ -n "$tf_version" ]]; then
    advice="leave --tf_version out, and the newest that there is will be chosen"
  elif ((${#left_out[@]})); then
    advice="$(against_pods_of "${left_out[0]}"): try it with --tf_version=${left_out[0]}, or take a type of one host"
  elif ((tpu_hosts > 1)); then
    advice="try another zone, --engine=pjrt, or a type of one host: there the program brings TensorFlow"
  else
    advice="try another zone, or name an image with --runtime_version: on one host the program brings TensorFlow"
  fi
  fail "this zone has no image $wanted for $type that Launcher can use, from 2.16.0 on (of its kind there is:" \
    "$(paste -sd ' ' - <<<"${versions:-none}")); $advice"
}

# What the start-up script reads: one key each, and the flags a line each.
# https://cloud.google.com/sdk/gcloud/reference/topic/escaping: another delimiter, as values may hold commas.
make_metadata() {
  local flags values joined program="${tensorflow_tpu[-1]}" replicas="$tpu_replicas"
  if [[ -n "$engine" ]]; then
    program="" replicas=$((tpu_replicas / tpu_hosts)) # each host's own
  elif ((tpu_hosts > 1)) && [[ "$image" =~ ^tpu-vm-tf-([0-9]+\.[0-9]+\.[0-9]+)- ]]; then
    program="$(program_for "${BASH_REMATCH[1]}")"
  elif [[ -n "$tf_version" ]]; then
    program="$(program_for "$tf_version")"
  elif ((tpu_hosts > 1)); then
    program="<version of the image>" # of a dry run
  fi
  flags="$(printf '%s\n' "$@")"
  values=("launcher-node=$node" "launcher-source=$source_url" "launcher-ref=$ref" "launcher-save-to=$save_to")
  values+=("launcher-tf-version=$program" "launcher-replicas=$replicas" "launcher-flags=$flags")
  joined="$(printf '|;|%s' "${values[@]}")"
  metadata=("--metadata=^|;|^${joined#"|;|"}" "--metadata-from-file=startup-script=$folder/tpu_vm_startup.sh")
}

create_node() {
  run gcloud compute tpus tpu-vm create "$node" "${place[@]}" "--accelerator-type=$type" "--version=$image" \
    ${spot:+--spot} "${metadata[@]}" "${gcloud_flags[@]}"
}

create_queued() {
  run gcloud compute tpus queued-resources create "$node" "--node-id=$node" "${place[@]}" "--accelerator-type=$type" \
    "--runtime-version=$image" ${spot:+--spot} ${valid_until:+"--valid-until-duration=$valid_until"} "${metadata[@]}" \
    "${gcloud_flags[@]}"
}

# standing STATE: says how what is there stands; fails when there is nothing left of it.
# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes and projects.locations.queuedResources
standing() {
  case "$1" in
    PREEMPTED | TERMINATED | FAILED | SUSPENDED)
      [[ -n "$recreate" ]] || try_later "$node is $1 and will not come back by itself: add --recreate, or delete it with" \
        "scripts/tpu_vm_delete.sh --node=$node ${place[*]}"
      say "$node is $1: deleting what is left of it"
      "$folder/tpu_vm_delete.sh" --yes "--node=$node" "${place[@]}" || exit
      return 1
      ;;
    STOPPED) try_later "$node is STOPPED; start it: gcloud compute tpus tpu-vm start $node ${place[*]}" ;;
    STOPPING | DELETING | SUSPENDING) try_later "$node is $1; try again when it is gone" ;;
    *) say "$node exists already, and is $1" ;;
  esac
}

# Polls, as queued-resources has no command that waits.
wait_for_node() {
  local deadline=$((SECONDS + wait_seconds)) pause=1 state
  while true; do
    state="$(queued_state "$node")" || try_later "the queued resource $node is gone"
    case "$state" in
      ACTIVE) say "$node is there" && return ;;
      FAILED | SUSPENDED | SUSPENDING) try_later "the queued resource $node is $state" ;;
    esac
    ((SECONDS < deadline)) || try_later "$node is not there after $wait_seconds s: the queued resource is $state, and stays in the queue"
    sleep "$pause"
    pause=$((pause < 16 ? 2 * pause : 30))
  done
}

if [[ -n "$dry_run" ]]; then
  show gcloud compute tpus tpu-vm describe "$node" "${place[@]}" '--format=value(state)'
  [[ -z "$queued" ]] || show gcloud compute tpus queued-resources describe "$node" "${place[@]}" '--format=value(state.state)'
else
  status=0
  state="$(node_state "$node")" || status="$?"
  if [[ -n "$queued" ]] && ((status == 1)); then
    status=0
    state="$(queued_state "$node")" || status="$?"
  fi
  ((status <= 1)) || fail "gcloud cannot say whether $node exists; its words are above"
  if ((status == 0)) && standing "$state"; then
    [[ -z "$wait_seconds" ]] || wait_for_node
    exit 0
  fi
fi
[[ -n "$dry_run" || -z "$source_url" ]] || check_flags "$@"
[[ -n "$image" ]] || choose_image
if [[ -z "$dry_run" ]]; then
  say "image: $image"
  if ((tpu_hosts > 1)) && [[ "$image" =~ ^tpu-vm-tf-([0-9.]+)- ]] && against="$(against_pods_of "${BASH_REMATCH[1]}")"; then
    say "note: $against"
  fi
fi
metadata=()
[[ -z "$source_url" ]] || make_metadata "$@"
if [[ -z "$queued" ]]; then
  create_node
else
  create_queued
  [[ -z "$wait_seconds" || -n "$dry_run" ]] || wait_for_node
fi
