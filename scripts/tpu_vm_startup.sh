#!/usr/bin/env bash
# Runs on every host of a Cloud TPU at each boot: installs Launcher, waits for the TPU, trains, or goes on training.
# Stands alone: the host has nothing else of Launcher when it starts.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/tpu_vm_startup.sh [--dry_run] [OPTION ...] [-- FLAG ...]

On a host of a Cloud TPU: installs Launcher in HOME/src and HOME/venv, waits until the TPU is there, and runs
launcher.main with the FLAGs; on a pod on host 0 only, as one program drives all hosts. With --engine=pjrt, here or among
the FLAGs, every host runs it, and all need --save_to, or a --model_dir that they share. As the start-up script of a node
that scripts/tpu_vm_create.sh made, it gets no options and reads them from the node's metadata. Run again, it does only
what is not done yet.

HOME/status.json says how it stands, HOME/startup.log what was printed. Its "state" is
  installing   Launcher is being installed
  waiting      for the TPU; on another host than 0: for nothing; with an "exit_code": for the next boot (42, 75 ...)
  training     launcher.main runs
  done         it ended with 0; nothing is started any more
  failed       with 64 or 70, which a retry would not help; nothing is started until the job is another one

  --source=WHERE       gs://BUCKET/FOLDER or the URL of a git repository; - reads it from standard input
  --ref=REF            branch, tag or commit (default: HEAD)
  --engine=pjrt        installs JAX in the place of TensorFlow for TPUs
  --tf_version=X.Y.Z   the TensorFlow to install, which on a pod must be that of the node's image
  --node=NAME, --replicas=N, --worker=N, --hosts=A,B   the node, its cores (with --engine=pjrt: this host's), this
                       host's number, all hosts' addresses
  --save_to=gs://...   where the run's files are copied, every --save_every=SECONDS (300) and at the end, and come from
  --tpu_wait=SECONDS   how long to wait for the TPU (default: 600)
  --home=HOME          default: $LAUNCHER_HOME, or /opt/launcher
  --install_only       do not train
  --foreground         do not become a service of systemd
  --dry_run            print the commands, run nothing
  --help               show this text

Exit codes: launcher.main's (0, 42, 64, 70, 75); 64 also for a mistake here, 75 for what may work at the next boot.
TEXT
}

home="${LAUNCHER_HOME:-/opt/launcher}"
source_url="" ref="" tf_version="" node="" replicas="" worker="" hosts="" save_to="" save_every=300 tpu_wait=600
install_only="" foreground="" dry_run="" phase="" job="" engine=""
flags=()
export HOME="${HOME:-/root}" # a start-up script has none

# What may be shown or kept of a text: a URL's user and password or token are not for logs.
public() {
  sed -uE 's#(://)[^/@[:space:]]*@#\1HIDDEN@#g'
}

say() {
  local line
  line="$(printf '%s %s' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*" | public)"
  printf '%s\n' "$line"
  [[ ! -d "$home" || -n "$dry_run" ]] || printf '%s\n' "$line" >>"$home/startup.log"
}

fail() {
  phase=""
  printf 'error: %s\n' "$*" | public >&2
  exit 64
}

show() {
  { printf '+' && printf ' %q' "$@" && printf '\n'; } | public
}

# Runs a command with its output in the log too.
logged() {
  if [[ -n "$dry_run" ]]; then
    show "$@"
  else
    "$@" 2>&1 | public | tee -a "$home/startup.log"
  fi
}

text() {
  printf '%s' "$1" | public | tr -d '\000-\037' | sed -e 's/\\/\\\\/g' -e 's/"/\\"/g'
}

# status STATE EXIT_CODE MESSAGE: for people and the other scripts; there whole or not at all.
status() {
  [[ -z "$dry_run" ]] || return 0
  say "$1${2:+ ($2)}: $3"
  printf '{\n  "state": "%s",\n  "exit_code": %s,\n  "message": "%s",\n  "worker": %d,\n  "job": "%s",\n  "time": "%s"\n}\n' \
    "$1" "${2:-null}" "$(text "$3")" "${worker:-0}" "$job" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$home/status.json.new"
  mv -f -- "$home/status.json.new" "$home/status.json"
}

was() {
  [[ ! -f "$home/status.json" ]] || sed -nE "s/^  \"$1\": \"?([^\",]*)\"?,?\$/\\1/p" "$home/status.json"
}

# stop EXIT_CODE MESSAGE: ends with what may or may not work at the next boot.
stop() {
  phase=""
  if (($1 == 64 || $1 == 70)); then
    status failed "$1" "$2"
  else
    status waiting "$1" "$2; the next boot tries again"
  fi
  printf 'error: %s\n' "$2" | public >&2
  exit "$1"
}

# What ends by itself while it installs: the network, a full disk, a signal.
# shellcheck disable=SC2329  # the trap of EXIT
ended() {
  local code="$?"
  [[ -z "$phase" || "$code" == 0 ]] || stop 75 "$phase failed with exit code $code, see $home/startup.log"
}

# https://cloud.google.com/compute/docs/metadata/querying-metadata. The keys of the TPU are those that
# jax/_src/clusters/cloud_tpu_cluster.py reads, the others what scripts/tpu_vm_create.sh set.
read_metadata() {
  local values=() address="${GCE_METADATA_HOST:-metadata.google.internal}"
  local keys=(launcher-source launcher-ref launcher-tf-version launcher-node launcher-replicas launcher-save-to
    launcher-flags agent-worker-number worker-network-endpoints)
  mapfile -d '' -t values < <(python3 - "http://$address/computeMetadata/v1/instance/attributes/" "${keys[@]}" \
    2>>"$home/startup.log" <<'PYTHON'
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "?recursive=true", headers={"Metadata-Flavor": "Google"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: it answers for this machine alone
found = json.load(opener.open(request, timeout=60))
for key in sys.argv[2:]:
    print(found.get(key, ""), end="\0")
PYTHON
  )
  ((${#values[@]} == ${#keys[@]})) || stop 75 "the metadata server does not answer, see $home/startup.log"
  source_url="${values[0]}" ref="${values[1]}" tf_version="${values[2]}" node="${values[3]}" replicas="${values[4]}"
  save_to="${values[5]}" worker="${values[7]}"
  # A list of addresses, or of name:id:address.
  hosts="$(tr ',' '\n' <<<"${values[8]}" | sed 's/.*://' | paste -sd ',' -)"
  mapfile -t flags <<<"${values[6]}" # a line each
  [[ "$worker" =~ ^[0-9]+$ || "$hosts" != *,* ]] ||
    stop 64 "agent-worker-number in the node's metadata is '$worker', and its hosts are $hosts: which one is this?"
  [[ -n "$source_url" ]] || stop 64 "neither --source nor launcher-source in the node's metadata: nothing to install"
  [[ -n "${flags[*]}" || -n "$install_only" ]] || stop 64 "launcher-flags in the node's metadata is empty: which recipe?"
}

fetch() {
  logged rm -rf -- "$home/src" # of a start that was cut short, or of another job
  logged mkdir -p -- "$home/src"
  if [[ "$source_url" == gs://* ]]; then
    # https://cloud.google.com/sdk/gcloud/reference/storage/rsync
    logged gcloud storage rsync --recursive "$source_url" "$home/src"
    return
  fi
  logged git -C "$home/src" init --quiet
  logged git -C "$home/src" fetch --quiet --depth=1 "$source_url" "${ref:-HEAD}"
  logged git -C "$home/src" checkout --quiet --detach FETCH_HEAD
}

# Sets `python` to an interpreter for which setup.py and PyPI have this tensorflow-tpu, or JAX.
need_python() {
  local oldest=10 newest=13 needs="tensorflow-tpu ${tf_version:-2.20.0}"
  case "${engine:-$tf_version}" in
    pjrt) oldest=11 needs="JAX" ;;
    2.1[0-8].*) newest=10 ;;
    2.19.*) newest=12 ;;
  esac
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    ! "$python" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, $newest))" >/dev/null 2>&1 || return 0
  done
  if [[ -n "$engine" && -z "${PYTHON:-}" ]] && command -v apt-get >/dev/null; then # Ubuntu 22.04 has 3.10, and 3.11 to install
    logged apt-get -o DPkg::Lock::Timeout=600 update -q
    logged env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q python3.11-venv
    python=python3.11
    return
  fi
  stop 64 "the host has $(python3 --version 2>&1 || true), and $needs needs Python 3.$oldest$( ((newest == oldest)) || printf ' to 3.%s' "$newest"): \
create the node with another image (tpu_vm_create.sh --tf_version), or install one there, such as python3.12"
}

# A run that goes on after a boot goes on with the code it began with: what is installed is not fetched again.
install() {
  local key library python="" pip=() venv="$home/venv${engine:+_$engine}" extras=tpu # side by side: they do not mix
  [[ -z "$engine" ]] || extras=cpu,jax_tpu
  key="$(public <<<"$source_url ${ref:-HEAD} ${engine:-$tf_version}")"
  if [[ -f "$home/installed" && "$(<"$home/installed")" == "$key" ]]; then
    say "installed already: $key"
    return
  fi
  if [[ -z "$dry_run" ]]; then
    rm -f -- "$home/installed"
    need_python
    pip=("PYTHON=$python")
  fi
  fetch
  [[ -n "$dry_run" || -f "$home/src/scripts/install.sh" ]] || stop 64 "$source_url is no checkout of Launcher: no scripts/install.sh"
  if [[ -n "$tf_version" ]]; then
    pip+=("PIP_CONSTRAINT=$home/constraints.txt")
    # Up to 2.18, tensorflow-tpu asks for a libtpu of its own version, which Google's storage has and PyPI has not.
    [[ ! "$tf_version" =~ ^2\.1[0-8]\. ]] ||
      pip+=("PIP_FIND_LINKS=${PIP_FIND_LINKS:+$PIP_FIND_LINKS }https://storage.googleapis.com/libtpu-tf-releases/index.html")
    [[ -n "$dry_run" ]] || printf 'tensorflow-tpu==%s\n' "$tf_version" >"$home/constraints.txt"
  fi
  [[ -n "$dry_run" || -e "$venv/pyvenv.cfg" ]] || rm -rf -- "$venv" # venv itself was cut short
  logged env "VENV=$venv" "${pip[@]}" bash "$home/src/scripts/install.sh" "$extras"
  [[ -z "$dry_run" ]] || return 0
  library=""
  [[ -n "$engine" ]] ||
    library="$("$venv/bin/python" -c 'import libtpu; print(libtpu.get_library_path())' 2>/dev/null)" || library=/lib/libtpu.so
  # TensorFlow loads the chips of its own host as a PJRT plugin, by these two variables (GoogleCloudPlatform's
  # ml-auto-solutions, dags/solutions_team, sets them so); on a pod they belong to the runtime, and with --engine=pjrt
  # JAX loads them.
  cat >"$home/python.new" <<TEXT
#!/bin/sh
if [ -z "$library" ] || [ "\${TPU_LOAD_LIBRARY:-1}" = 0 ]; then
  unset NEXT_PLUGGABLE_DEVICE_USE_C_API TF_PLUGGABLE_DEVICE_LIBRARY_PATH
else
  export NEXT_PLUGGABLE_DEVICE_USE_C_API=true TF_PLUGGABLE_DEVICE_LIBRARY_PATH="$library"
fi
exec "$venv/bin/python" "\$@"
TEXT
  chmod 755 "$home/python.new"
  mv -f -- "$home/python.new" "$home/python"
  printf '%s\n' "$key" >"$home/installed.new"
  mv -f -- "$home/installed.new" "$home/installed"
}

# Whether the program on host 0 drives other hosts, too, by their TPU workers.
drives_all() {
  [[ "$hosts" == *,* && -z "$engine" ]]
}

# The device files of this host, or where it drives others the TPU workers of all hosts, which answer.
tpu_is_there() {
  local host pattern
  if ! drives_all; then
    for pattern in ${TPU_DEVICES:-/dev/accel[0-9]* /dev/vfio/[0-9]*}; do
      [[ ! -e "$pattern" ]] || return 0
    done
    return 1
  fi
  for host in ${hosts//,/ }; do
    # shellcheck disable=SC2016  # the inner shell expands them
    timeout 5 bash -c ': <"/dev/tcp/$0/$1"' "$host" "${TPU_RUNTIME_PORT:-8470}" 2>/dev/null || return 1
  done
}

wait_for_tpu() {
  local deadline=$((SECONDS + tpu_wait)) what="the TPU's device files"
  ! drives_all || what="the TPU runtime of all hosts, port ${TPU_RUNTIME_PORT:-8470} of $hosts"
  status waiting "" "for $what"
  until tpu_is_there; do
    ((SECONDS < deadline)) || stop 75 "no TPU after $tpu_wait s: missing are $what"
    sleep 1
  done
}

# A checkpoint that is still being written has such a name; one that was copied in part does not verify and is skipped.
save() {
  [[ -n "$save_to" && -d "$model_dir" ]] || return 0
  gcloud storage rsync --recursive '--exclude=.*\.(writing|deleting)-.*' "$model_dir" "$save_to" >>"$home/startup.log" 2>&1
}

restore() {
  local said
  [[ -n "$save_to" ]] || return 0
  if ! said="$(gcloud storage ls "$save_to/" 2>&1)"; then
    [[ "$said" == *"matched no objects"* ]] || stop 75 "cannot read $save_to: $said"
    [[ -z "$mirrors" ]] || rm -rf -- "$model_dir"
    return 0
  fi
  [[ -z "$mirrors" ]] || rm -rf -- "$model_dir"
  mkdir -p -- "$model_dir"
  # What is here is newer than what is there.
  logged gcloud storage rsync --recursive --no-clobber "$save_to" "$model_dir"
}

# A signal is passed on once: a second one would end the program before it has saved.
# shellcheck disable=SC2329  # a trap
pass_on() {
  signals=$((signals + 1))
  say "told to stop: launcher.main saves and ends"
  ((signals > 1)) || kill -TERM "$program" 2>/dev/null || true
}

# Runs launcher.main and sets `code`.
train() {
  local saver="" heard=-1
  signals=0
  cd -- "$home/src"
  "${command[@]}" > >(tee -a "$home/startup.log") 2>&1 &
  program="$!"
  trap pass_on TERM INT
  if [[ -n "$save_to" ]]; then
    (
      exec 9>&-
      trap 'kill "$!" 2>/dev/null; exit' TERM
      while sleep "$save_every" & wait "$!" && kill -0 "$program" 2>/dev/null; do
        save & wait "$!" || say "could not save to $save_to; trying again in $save_every s"
      done
    ) &
    saver="$!"
  fi
  code=255
  while ((code > 128 && heard != signals)); do # a signal ends the waiting, not the program
    heard="$signals"
    code=0
    wait "$program" || code="$?"
  done
  [[ -z "$saver" ]] || { kill "$saver" && wait "$saver"; } 2>/dev/null || true
}

given=$#
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    --foreground) foreground=1 ;;
    --install_only) install_only=1 ;;
    --source=-) IFS= read -r source_url || [[ -n "$source_url" ]] || fail "--source=-: nothing came from standard input" ;;
    --source=*) source_url="${1#*=}" ;;
    --engine=pjrt) engine=pjrt ;;
    --home=* | --ref=* | --tf_version=* | --node=* | --replicas=* | --worker=* | --hosts=* | --save_to=* | --save_every=* | --tpu_wait=*)
      name="${1%%=*}"
      printf -v "${name#--}" '%s' "${1#*=}"
      ;;
    --) shift && break ;;
    *) fail "unknown option $1; flags of launcher.main stand behind --, and --help shows the rest" ;;
  esac
  shift
done
flags=("$@")
[[ "$home" =~ ^/[^/]+/?.*$ && "$home" != *[[:space:]\"]* ]] || fail "--home=$home: must be the whole path of a folder, without spaces"
[[ "$tpu_wait" =~ ^[0-9]{1,6}$ ]] || fail "--tpu_wait=$tpu_wait: must be a whole number of seconds"
[[ "$save_every" =~ ^[1-9][0-9]{0,5}$ ]] || fail "--save_every=$save_every: must be a whole number of seconds"
[[ -z "$worker" || "$worker" =~ ^[0-9]+$ ]] || fail "--worker=$worker: must be a number from 0"
from_metadata=""
[[ -n "$source_url" ]] || from_metadata=1
[[ -z "$from_metadata" || -z "$dry_run" ]] || fail "--dry_run asks nobody, so say what to install: --source=WHERE"
[[ -n "$from_metadata" || -n "$install_only" || ${#flags[@]} -gt 0 ]] ||
  fail "which recipe? Such as -- --gin_file=resnet_tpu.gin, or --install_only"
if [[ -z "$dry_run" ]]; then
  mkdir -p -- "$home" 2>/dev/null && [[ -w "$home" ]] || fail "--home=$home: cannot be written; run this as root, or choose another"
fi

# At boot: a service of its own. The boot ends, and a shutdown sends SIGTERM to this process alone, and once.
if ((given == 0)) && [[ -z "$foreground" ]] && command -v systemd-run >/dev/null; then
  if systemctl is-active --quiet launcher.service; then
    say "launcher.service runs already"
    exit 0
  fi
  cp -f -- "${BASH_SOURCE[0]}" "$home/startup.sh.new" # the copy that runs now goes away
  mv -f -- "$home/startup.sh.new" "$home/startup.sh"
  exec systemd-run --unit=launcher --collect --property=KillMode=mixed --property=TimeoutStopSec=90 \
    "--setenv=LAUNCHER_HOME=$home" "--setenv=HOME=$HOME" "--setenv=PATH=$PATH" bash "$home/startup.sh" --foreground
fi
if [[ -z "$dry_run" ]]; then
  # Held by launcher.main too: while it lives, no second one is started.
  exec 9>"$home/lock"
  if ! flock --nonblock 9; then
    say "runs already, see $home/status.json"
    [[ -z "$install_only" ]] || exit 75 # who asks for this wants to train
    exit 0
  fi
fi
trap ended EXIT
phase="reading the node's metadata"
[[ -z "$from_metadata" ]] || read_metadata
phase=""
worker="${worker:-0}"
if [[ " ${flags[*]} " =~ " --engine"[=\ ]"pjrt " ]]; then
  engine=pjrt
elif [[ -n "$engine" ]]; then
  flags+=(--engine=pjrt)
fi
[[ "$source_url" != -* && "$ref" != -* ]] || fail "--source=$source_url --ref=$ref: neither may begin with a dash"
! drives_all || [[ -n "$node" || -n "$install_only" ]] || fail "--hosts=$hosts names several: what is the node called? Say --node=NAME"
[[ "$hosts" != *,* || -z "$engine" || -n "$install_only$save_to" || " ${flags[*]}" == *" --model_dir="* ]] ||
  stop 64 "with --engine=pjrt all hosts read the run's checkpoints: give --save_to=gs://..., or --model_dir on a disk they share"
if [[ -z "$install_only" && -z "$dry_run" ]]; then
  job="$(printf '%s\0' "$source_url" "$ref" "${flags[@]}" | sha256sum | cut -c 1-16)"
  if [[ "$(was job)" == "$job" ]]; then
    case "$(was state) $(was exit_code)" in
      "done "*) say "this job is done already" && exit 0 ;;
      "failed "*)
        code="$(was exit_code)"
        say "this job failed with $code, and is not started again: change it, or remove $home/status.json"
        exit "$code"
        ;;
    esac
  fi
fi

phase="installing"
status installing "" "$source_url ${ref:-HEAD}"
install
phase=""
if [[ -n "$install_only" ]]; then
  status waiting "" "installed; nothing to train here"
  exit 0
fi
model_dir="$home/run" mirrors="" environment=()
for flag in "${flags[@]}"; do
  case "$flag" in --model_dir=*) model_dir="${flag#*=}" ;; esac
done
if [[ " ${flags[*]}" != *" --model_dir="* ]]; then
  flags+=("--model_dir=$model_dir")
  # Hosts that train together go on from the same checkpoint: what is in the bucket, and nothing newer that one has.
  [[ "$hosts" != *,* || -z "$engine" ]] || mirrors=1
elif [[ "$worker" != 0 ]]; then
  save_to="" # the folder is host 0's to fill
fi
if drives_all || [[ -n "$engine" ]]; then
  [[ -z "$replicas" || " ${flags[*]}" == *" --replicas="* ]] || flags+=("--replicas=$replicas")
fi
module=(launcher.main)
if drives_all; then
  environment=("TPU_NAME=$node" TPU_LOAD_LIBRARY=0)
elif [[ "$hosts" == *,* ]]; then # each with a supervisor, which waits for those that install for longer
  addresses="$(tr ',' '\n' <<<"$hosts" | sed -E '/:/!s/$/:2222/; s/.*/"&"/' | paste -sd ',' -)"
  environment=("TF_CONFIG={\"cluster\": {\"worker\": [$addresses]}, \"task\": {\"type\": \"worker\", \"index\": $worker}}")
  module=(launcher.launch --backend=member --start_timeout=3600)
elif [[ -z "$engine" ]]; then
  environment=(TPU_NAME=local)
fi
command=(env "${environment[@]}" "$home/python" -m "${module[@]}" "${flags[@]}")
if [[ -n "$dry_run" ]]; then
  [[ "$worker" == 0 ]] || ! drives_all || { printf '# host %s of %s: leaves its chips to the TPU runtime\n' "$worker" "$hosts" && exit 0; }
  printf '# waits up to %s s for the TPU\n' "$tpu_wait"
  [[ -z "$mirrors" ]] || show rm -rf -- "$model_dir"
  [[ -z "$save_to" ]] || show gcloud storage rsync --recursive --no-clobber "$save_to" "$model_dir"
  show "${command[@]}"
  [[ -z "$save_to" || "$worker" != 0 ]] || show gcloud storage rsync --recursive '--exclude=.*\.(writing|deleting)-.*' "$model_dir" "$save_to"
  exit 0
fi
if [[ "$worker" != 0 ]] && drives_all; then
  status waiting "" "host $worker leaves its chips to the TPU runtime; host 0 trains"
  exit 0
fi
wait_for_tpu
phase="restoring"
restore
[[ "$worker" == 0 ]] || save_to="" # one saves for all
phase=""
status training "" "${command[*]}"
train
saved=1
save || saved=""
case "$code" in
  0)
    [[ -n "$saved" ]] || stop 75 "trained, but $model_dir could not be copied to $save_to"
    status "done" 0 "trained; the results are in $model_dir${save_to:+ and $save_to}"
    ;;
  64 | 70) status failed "$code" "a retry would not help, see $home/startup.log" ;;
  *) status waiting "$code" "launcher.main ended with $code; the next boot goes on" ;;
esac
exit "$code"
