# Sourced by the scripts for Cloud TPU: what an accelerator type says about a slice, and how gcloud is spoken to.
# shellcheck shell=bash

tpu_slices="$(dirname -- "${BASH_SOURCE[0]}")/../launcher/preflight/tpu_slices.txt"
# shellcheck disable=SC2034  # for the scripts that source this
dry_run="" tpu_family="" tpu_hosts=0 tpu_replicas=0
place=() # --zone and --project, as given

# Of tensorflow-tpu what PyPI has from 2.16 on, oldest first.
tensorflow_tpu=(2.16.1 2.16.2 2.17.0 2.17.1 2.18.0 2.19.1 2.20.0)
# Images of pods with which one user's programs hang: tensorflow/tensorflow issues 82208 and 93618.
pods_hang=(2.18.0 2.19.0)

# What may be shown of a text: a URL's user and password or token are nobody's business, nor what a log is for.
public() {
  sed -E 's#(://)[^/@[:space:]]*@#\1HIDDEN@#g' <<<"$*"
}

fail() {
  printf 'error: %s\n' "$(public "$*")" >&2
  exit 64
}

# Ends with 75: nothing is wrong with what was asked for, and later it may work.
try_later() {
  printf 'error: %s\n' "$(public "$*")" >&2
  exit 75
}

say() {
  public "$*" >&2
}

# A command as a shell would read it, but for tokens in URLs and the values of --env.
show() {
  local word before="" line="+"
  for word in "$@"; do
    [[ "$before" != --env || "$word" != *=* ]] || word="${word%%=*}=HIDDEN"
    [[ "$word" != --env=*=* ]] || word="--env=$(cut -d = -f 2 <<<"$word")=HIDDEN"
    line+=" $(printf '%q' "$word")"
    before="$word"
  done
  public "$line"
}

run() {
  if [[ -n "$dry_run" ]]; then
    show "$@"
  else
    "$@"
  fi
}

# Prints what a command that only asks prints. Nothing, and status 1, when gcloud says that there is no such thing;
# any other error ends the script with gcloud's words, before anything was changed.
ask() {
  local errors answer status=0
  errors="$(mktemp)"
  answer="$("$@" 2>"$errors")" || status="$?"
  if ((status == 0)); then
    rm -f -- "$errors"
    printf '%s\n' "$answer"
    return
  fi
  if grep -qE 'NOT_FOUND|was not found|matched no objects' "$errors"; then
    rm -f -- "$errors"
    return 1
  fi
  cat -- "$errors" >&2
  rm -f -- "$errors"
  return 2
}

node_state() {
  ask gcloud compute tpus tpu-vm describe "$1" "${place[@]}" '--format=value(state)'
}

queued_state() {
  ask gcloud compute tpus queued-resources describe "$1" "${place[@]}" '--format=value(state.state)'
}

# need_name FLAG VALUE: https://cloud.google.com/compute/docs/naming-resources
need_name() {
  [[ "$2" =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] ||
    fail "$1=$2: is no name; use small letters, digits and dashes, a letter first, at most 63"
}

need_place() {
  [[ "$2" =~ ^[a-z0-9]([-a-z0-9:.]*[a-z0-9])?$ ]] || fail "$1=$2: is no such name; use small letters, digits and dashes"
}

need_seconds() {
  [[ "$2" =~ ^[0-9]{1,6}$ ]] || fail "$1=$2: must be a whole number of seconds"
}

# need_source FLAG VALUE: where a checkout of Launcher comes from.
need_source() {
  case "$2" in
    gs://?*/*[!/] | https://?* | ssh://?* | git@?*:?* | /?*) ;;
    *) fail "$1=$2: must be a folder in a bucket (gs://BUCKET/FOLDER) or a git repository (https://..., ssh://..., /path)" ;;
  esac
}

# check_flags FLAG ...: flags, recipes and bindings of launcher.main, by this checkout, before anything is paid for.
check_flags() {
  local root python said status=0
  root="$(cd -- "$(dirname -- "$tpu_slices")/../.." && pwd)"
  python="${PYTHON:-$root/.venv/bin/python}"
  [[ -n "${PYTHON:-}" || -x "$python" ]] || python=python3
  said="$(cd -- "$root" && "$python" scripts/check_flags.py "$@" 2>/dev/null)" || status="$?"
  ((status != 64)) || fail "behind --: $said (looked at in $root)"
  ((status == 0)) || say "note: recipe and bindings are not checked before the node is made: $python has no Launcher, or the node alone has the recipe"
}

need_gcloud() {
  [[ -n "$dry_run" ]] || command -v gcloud >/dev/null ||
    fail "there is no gcloud on PATH; install it: https://cloud.google.com/sdk/docs/install"
}

# read_type TYPE: sets tpu_family, tpu_hosts and tpu_replicas, or says which types there are.
# The number counts TensorCores, two a chip, or chips. A replica of TensorFlow is a TensorCore of v2 and v3, and a chip
# of the others: v4 and v5p join the two cores of a chip.
# shellcheck disable=SC2034  # for the scripts that source this
read_type() {
  local type="$1" number family counts most shapes shape size a_chip=1 chips listed sizes=()
  [[ "$type" =~ ^([a-z0-9]*[a-z0-9])-([1-9][0-9]{0,5})$ ]] ||
    fail "--type=$type: is no accelerator type; write FAMILY-NUMBER, such as v5litepod-16, v4-32 or v6e-8"
  tpu_family="${BASH_REMATCH[1]}"
  number="${BASH_REMATCH[2]}"
  case "$tpu_family" in
    v5e | v5lite) fail "--type=$type: there is no such family; v5e is called v5litepod: --type=v5litepod-$number" ;;
    v5) fail "--type=$type: there is no such family; did you mean v5p-$number or v5litepod-$number?" ;;
    v6) fail "--type=$type: there is no such family; did you mean v6e-$number?" ;;
    tpu7x | v7x) fail "--type=$type: the Cloud TPU API has none later than v6e; GKE and Compute Engine have" ;;
  esac
  while read -r family counts most shapes && [[ "$family" != "$tpu_family" ]]; do :; done <"$tpu_slices"
  [[ -n "$shapes" ]] ||
    fail "--type=$type: there is no such family; there is v2, v3, v4, v5litepod (v5e), v5p and v6e"
  [[ "$counts" == chips ]] || a_chip=2
  for shape in $shapes; do
    size=$((${shape//x/*} * a_chip)) # the product of its lengths
    ((most && size >= 128)) || sizes+=("$size")
  done
  listed="$(IFS=, && echo "${sizes[*]}")"
  [[ ",$listed," == *",$number,"* ]] || ((number % 128 == 0 && number <= most)) ||
    fail "--type=$type: $tpu_family comes with ${listed//,/, }$( ((!most)) || printf ' and multiples of 128 up to %s' "$most")"
  chips=$((number / a_chip))
  tpu_hosts=$((a_chip == 1 && chips <= 8 ? 1 : chips / 4)) tpu_replicas="$chips"
  [[ "$tpu_family" != v[23] ]] || tpu_replicas="$number"
}

# later VERSION THAN: whether a version is THAN or later.
later() {
  [[ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" == "$2" ]]
}

# need_tensorflow VERSION: as setup.py has it, in the extra tpu.
need_tensorflow() {
  later "$1" 2.16.0 || fail "TensorFlow $1: Launcher needs 2.16.0 or later"
}

# program_for VERSION: prints the tensorflow-tpu for an image's TensorFlow: of the same version, or where PyPI has none
# the newest of the same X.Y, which is what launcher/machine/tpu.py compares. Later versions than known here stay.
program_for() {
  local version found=""
  for version in "${tensorflow_tpu[@]}"; do
    [[ "$version" != "$1" ]] || { printf '%s\n' "$1" && return; }
    [[ "${version%.*}" != "${1%.*}" ]] || found="$version"
  done
  printf '%s\n' "${found:-$1}"
}

# against_pods_of VERSION: prints what is known against an image of a pod; status 1 if nothing is.
against_pods_of() {
  local program
  program="$(program_for "$1")"
  if [[ " ${pods_hang[*]} " == *" $1 "* ]]; then
    printf 'pods of TensorFlow %s hang, by reports of a user (docs/tpu.md)\n' "$1"
  elif [[ "$program" != "$1" ]]; then
    printf 'PyPI has no tensorflow-tpu %s, so the program takes %s, which nobody has tried\n' "$1" "$program"
  elif [[ " ${tensorflow_tpu[*]} " != *" $1 "* ]]; then
    printf 'tensorflow-tpu %s is not known here, and was not on PyPI when this was written\n' "$1"
  else
    return 1
  fi
}

# on_every_host FLAG ...: whether the flags choose the engine that every host runs, JAX's.
on_every_host() {
  [[ " $* " =~ " --engine"[=\ ]"pjrt " ]]
}

# An image for that engine, which brings no framework, for the type that was read: as Google's page has them for JAX,
# https://docs.cloud.google.com/tpu/docs/runtimes
base_image() {
  case "$tpu_family" in
    v5litepod) printf 'v2-alpha-tpuv5-lite\n' ;;
    v5p) printf 'v2-alpha-tpuv5\n' ;;
    v6e) printf 'v2-alpha-tpuv6e\n' ;;
    *) printf 'tpu-ubuntu2204-base\n' ;;
  esac
}

# need_free_chips IMAGE: for that engine, none whose TPU workers have the chips.
need_free_chips() {
  [[ "$1" != tpu-vm-tf-*-pod-* ]] ||
    fail "the image $1 starts TensorFlow's TPU workers, which hold the chips: with --engine=pjrt take another, such as" \
      "$(base_image)"
}

# image_of TF_VERSION: the image of TensorFlow's TPU software for the type that was read. On a pod it runs TensorFlow's
# TPU worker on every host, whose version must be the program's. https://docs.cloud.google.com/tpu/docs/runtimes
image_of() {
  if ((tpu_hosts > 1)); then
    printf 'tpu-vm-tf-%s-pod-pjrt\n' "$1"
  else
    printf 'tpu-vm-tf-%s-pjrt\n' "$1"
  fi
}

# The variants by family that some versions of an image come in, seen since 2.18.0 (tensorflow/tensorflow issue 82208).
image_variant_of() {
  case "$tpu_family" in
    v5litepod | v6e) printf '%s-v5e-and-v6\n' "$(image_of "$1")" ;;
    *) printf '%s-v5p-and-below\n' "$(image_of "$1")" ;;
  esac
}
