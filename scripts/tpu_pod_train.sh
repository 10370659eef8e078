#!/usr/bin/env bash
# Trains on a Cloud TPU node that is there: sets all hosts up, supervises the program on host 0 from here, keeps all logs.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/tpu_pod_train.sh [--dry_run] --node=NAME --source=WHERE [OPTION ...] FLAG ...

Installs Launcher on every host of the Cloud TPU node NAME with scripts/tpu_vm_startup.sh, runs
python -m launcher.launch --backend=tpu_vm with the FLAGs, which starts launcher.main on host 0, watches it and restarts
it, and in the end fetches the logs of all hosts. --model_dir is a folder of host 0, such as /mnt/disks/runs/resnet.
With --engine=pjrt among the FLAGs, every host runs launcher.main, and --model_dir is a folder that all hosts share.

  --source=WHERE         a checkout of Launcher: gs://BUCKET/FOLDER or the URL of a git repository; a token in it, as in
                         https://TOKEN@HOST/launcher.git, is neither printed nor logged
  --ref=REF              with a git repository: branch, tag or commit (default: HEAD)
  --zone=ZONE, --project=PROJECT   default: those gcloud is set to
  --home=FOLDER          on the hosts (default: /opt/launcher)
  --logs=FOLDER          here, for the hosts' logs (default: tpu_logs/NAME)
  --dry_run              print the commands, run nothing
  --help                 show this text

Environment: PYTHON, the interpreter here (default: .venv's beside the checkout, else python3).
Exit codes: launcher.launch's (0, 42, 64, 70, 75); 64 also for a mistake here, 75 when the node is not READY.
TEXT
}

folder="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname -- "$folder")"
tpu_hosts=0 tpu_replicas=0 # what is sourced sets them
# shellcheck source=/dev/null
source "$folder/tpu_types.bash"

node="" zone="" project="" source_url="" ref="" home="/opt/launcher" logs=""
flags=()
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --node=*) node="${1#*=}" ;;
    --source=*) source_url="${1#*=}" && need_source --source "$source_url" ;;
    --ref=*) ref="${1#*=}" ;;
    --zone=*) zone="${1#*=}" && need_place --zone "$zone" ;;
    --project=*) project="${1#*=}" && need_place --project "$project" ;;
    --home=*) home="${1#*=}" ;;
    --logs=*) logs="${1#*=}" ;;
    *) flags+=("$1") ;;
  esac
  shift
done
[[ -n "$node" ]] || fail "--node is missing: on which node?"
need_name --node "$node"
[[ -n "$source_url" ]] || fail "--source is missing: from where is Launcher installed on the hosts?"
[[ " ${flags[*]}" == *" --gin_file"* ]] || fail "name a recipe, such as --gin_file=resnet_tpu.gin; --help shows more"
[[ " ${flags[*]}" == *" --model_dir=/"* ]] || fail "say where results go on host 0: --model_dir=/WHOLE/PATH"
[[ "$home" =~ ^/[A-Za-z0-9._/-]+$ ]] || fail "--home=$home: must be the whole path of a folder on the hosts"
[[ -z "$ref" || "$ref" =~ ^[A-Za-z0-9._][A-Za-z0-9._/-]*$ ]] || fail "--ref=$ref: is no branch, tag or commit"
logs="${logs:-tpu_logs/$node}"
default_python="$root/.venv/bin/python"
[[ -x "$default_python" ]] || default_python="$(command -v python3)" || fail "no python3 here; set PYTHON"
need_gcloud
[[ -z "$zone" ]] || place+=("--zone=$zone")
[[ -z "$project" ]] || place+=("--project=$project")

describe=(gcloud compute tpus tpu-vm describe "$node" "${place[@]}")
describe+=('--format=csv[no-heading](state,acceleratorType.basename(),runtimeVersion,networkEndpoints[].ipAddress)')
state=READY type="" image="" engine="" hosts="<addresses of the hosts, with commas>"
! on_every_host "${flags[@]}" || engine=pjrt
if [[ -n "$dry_run" ]]; then
  show "${describe[@]}"
  [[ -n "$engine" ]] || printf '# for a node of several hosts; of one, --tpu=local instead of --replicas\n'
  tpu_hosts=2 replicas="<cores>" tf_version="<version of the image>"
else
  status=0
  answer="$(ask "${describe[@]}")" || status="$?"
  ((status != 1)) || fail "there is no node $node; make it: scripts/tpu_vm_create.sh --node=$node --type=TYPE ${place[*]}"
  ((status == 0)) || fail "gcloud cannot describe $node; its words are above"
  IFS=, read -r state type image hosts <<<"$answer"
  [[ "$state" == READY ]] || try_later "$node is $state, not READY"
  read_type "$type"
  replicas="$tpu_replicas" hosts="$(tr -d '"' <<<"${hosts//;/,}")"
  if [[ -n "$engine" ]]; then
    need_free_chips "$image"
    replicas=$((tpu_replicas / tpu_hosts))
    (($(tr ',' '\n' <<<"$hosts" | grep -c .) == tpu_hosts)) ||
      fail "$node has $tpu_hosts hosts, and gcloud names other addresses: ${hosts:-none}"
  elif ((tpu_hosts > 1)); then
    [[ "$image" =~ ^tpu-vm-tf-([0-9]+\.[0-9]+\.[0-9]+)-pod-pjrt ]] ||
      fail "$node has $tpu_hosts hosts and the image $image, not tpu-vm-tf-X.Y.Z-pod-pjrt: no TensorFlow worker runs on" \
        "them. Add --engine=pjrt, or make it anew with scripts/tpu_vm_create.sh"
    tf_version="${BASH_REMATCH[1]}"
    need_tensorflow "$tf_version"
    ! against="$(against_pods_of "$tf_version")" || say "note: $against"
    tf_version="$(program_for "$tf_version")"
  fi
fi

# https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/scp and /ssh
ssh=(gcloud compute tpus tpu-vm ssh "$node" "${place[@]}" --worker=all --quiet)
# By a pipe: sudo writes its command line to the log of the host, and --source may hold a token.
install=(sudo bash /tmp/tpu_vm_startup.sh --install_only "--home=$home" --source=-)
[[ -z "$ref" ]] || install+=("--ref=$ref")
[[ -z "$engine" ]] || install+=("--engine=$engine")
((tpu_hosts == 1)) || [[ -n "$engine" ]] || install+=("--tf_version=$tf_version")
run gcloud compute tpus tpu-vm scp "$folder/tpu_vm_startup.sh" "$node:/tmp/tpu_vm_startup.sh" "${place[@]}" \
  --worker=all --quiet || try_later "the hosts cannot be reached; gcloud's words are above"
run "${ssh[@]}" "--command=printf %s $(printf '%q' "$source_url") | $(printf '%q ' "${install[@]}")" ||
  try_later "the hosts could not all be set up; what they said is above, and in $home/startup.log there"

# Of every host a file here, named after its number, whatever the training came to.
gather() {
  local read_logs="tail -n 2000 $home/startup.log; sudo journalctl --unit=tpu-runtime --no-pager --lines=2000"
  run mkdir -p -- "$logs"
  run "${ssh[@]}" "--command=$read_logs" "--output-directory=$logs" ||
    say "the logs of the hosts could not be fetched"
}

launch=("${PYTHON:-$default_python}" -m launcher.launch --backend=tpu_vm "--tpu_node=$node" "${place[@]}")
launch+=("--remote_python=$home/python" "--remote_dir=$home/src")
[[ -z "$engine" ]] || launch+=("--hosts=$hosts")
if ((tpu_hosts == 1)) && [[ -z "$engine" ]]; then
  launch+=(--tpu=local)
elif [[ " ${flags[*]}" != *" --replicas="* ]]; then
  launch+=("--replicas=$replicas")
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# Runs the supervisor and sets `status`. bash has what it runs in the background ignore Ctrl-C, so all signals are passed
# on as SIGTERM, which means the same; a supervisor that gets one twice takes it for one.
supervise() {
  local heard=-1
  signals=0
  "${launch[@]}" "${flags[@]}" &
  program="$!"
  trap 'signals=$((signals + 1)); kill -TERM "$program" 2>/dev/null || true' INT TERM HUP
  status=255
  while ((status > 128 && heard != signals)); do # a signal ends the waiting, not the supervisor
    heard="$signals"
    status=0
    wait "$program" || status="$?"
  done
  trap ':' INT TERM HUP # the logs are still to be fetched
}

status=0
if [[ -n "$dry_run" ]]; then
  show "${launch[@]}" "${flags[@]}"
else
  supervise
fi
gather
[[ -n "$dry_run" ]] || say "logs of all hosts: $logs; of the program: under --model_dir, here"
exit "$status"
