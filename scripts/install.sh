#!/usr/bin/env bash
# Makes a virtual environment beside the checkout and installs Launcher into it.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/install.sh [--dry_run] EXTRAS

Makes .venv beside the checkout, if it is missing, and installs Launcher into it, editable, with EXTRAS: cpu, cuda or
tpu for the machine, demo for the embedded data, test for the test suite; several with commas, such as cpu,demo.
preflight, gpu_preflight and, with cpu, for --engine=pjrt, jax_cuda12, jax_cuda13 and jax_tpu need Python 3.11 or later.
auto is cuda where there is an NVIDIA GPU (nvidia-smi lists one, or /dev/nvidia0 is there) and TensorFlow has wheels for
it, on Linux on x86-64; else it is cpu. Nothing is done again until setup.py or pyproject.toml changes. An environment
that has another distribution of TensorFlow than EXTRAS bring is left as it is.

Environment:
  VENV     the virtual environment (default: .venv beside the checkout)
  PYTHON   the interpreter that makes it, 3.10 to 3.13 (default: the first that fits of python3, python3.13 ... 3.10)
  CONSTRAINTS   a file of versions to install, such as constraints.txt, with which the tests passed (default: the newest)

  --dry_run   print what would run, run nothing
  --help      show this text
TEXT
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

run() {
  if [[ -n "$dry_run" ]]; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}

supported() {
  "$1" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] <= (3, 13))" >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python from 3.$oldest to 3.13$because; name another one"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if supported "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python from 3.$oldest to 3.13$because on PATH (found: $(python3 --version 2>&1 || true)); install one, such as" \
    "apt-get install python3 python3-venv, or name it: PYTHON=/path/to/python3"
}

# Debian splits venv's own pip off into a package.
need_ensurepip() {
  local python="$1" package
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 && return
  package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    run apt-get update -q
    run env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package"
  elif [[ -n "$dry_run" ]]; then
    run sudo apt-get install "$package"
  else
    fail "$python cannot make virtual environments: ensurepip is missing. Install it: sudo apt-get install $package"
  fi
}

has_gpu() {
  [[ "$(uname -sm)" == "Linux x86_64" ]] || return
  [[ -e /dev/nvidia0 ]] || { nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '; }
}

# The distributions that bring the module `tensorflow`: those of EXTRAS, as in setup.py, and those in the environment.
wanted_tensorflow() {
  local cpu=tensorflow extra
  [[ ! "$(uname -m)" =~ ^(x86_64|AMD64)$ ]] || cpu=tensorflow-cpu
  for extra in ${extras//,/ }; do
    case "$extra" in
      cpu | test) printf '%s\n' "$cpu" ;;
      cuda) printf 'tensorflow\n' ;;
      tpu) printf 'tensorflow-tpu\n' ;;
    esac
  done | sort -u
}

installed_tensorflow() {
  [[ -x "$python" ]] || return 0
  "$python" - <<'PYTHON'
import importlib.metadata, re
names = (re.sub("[-_.]+", "-", one.metadata["Name"] or "").lower() for one in importlib.metadata.distributions())
print(*sorted({one for one in names if re.fullmatch("(tensorflow|tf-nightly)(-(cpu|tpu|gpu|intel|macos|rocm|aarch64))?", one)}))
PYTHON
}

nearest() {
  local python
  for python in "${PYTHON:-}" python3; do
    "$python" - "$1" "$known" <<'PYTHON' 2>/dev/null && return
import difflib, sys
found = {"gpu": ["cuda"]}.get(sys.argv[1]) or difflib.get_close_matches(sys.argv[1], sys.argv[2].split(), 1)
print(*(f" did you mean '{name}'?" for name in found), end="")
PYTHON
  done
}

dry_run=""
extras=""
while (($#)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dry_run) dry_run=1 ;;
    -*) fail "unknown option $1; --help shows what there is" ;;
    *) [[ -z "$extras" ]] || fail "one argument, several extras with commas, such as cpu,demo"; extras="$1" ;;
  esac
  shift
done
[[ -n "$extras" ]] || fail "which extras? Such as: scripts/install.sh cpu,demo (--help shows more)"
[[ "$extras" =~ ^[a-z0-9_]+(,[a-z0-9_]+)*$ ]] || fail "'$extras' is not a list of extras, such as cpu,demo"

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
known=" auto"
extra='^ {8}"([a-z0-9_]+)": '
within=""
while IFS= read -r each; do
  [[ "$each" != *extras_require* ]] || within=1
  [[ -z "$within" || ! "$each" =~ $extra ]] || known+=" ${BASH_REMATCH[1]}"
done <"$root/setup.py"
for each in ${extras//,/ }; do # pip passes over an extra that it does not know
  [[ "$known " == *" $each "* ]] || fail "there is no extra '$each';$(nearest "$each") there are:$known"
done

oldest=10
because=""
if [[ "$extras," =~ (preflight|jax_(cuda12|cuda13|tpu)), ]]; then # on 3.10 pip would leave JAX out and say nothing
  oldest=11
  because=", which [$extras] needs"
fi
if [[ ",$extras," == *,auto,* ]]; then
  chosen=cpu
  ! has_gpu || chosen=cuda
  printf 'auto: %s\n' "$chosen" >&2
  extras="$(sed "s/,auto,/,$chosen,/; s/^,//; s/,\$//" <<<",$extras,")"
fi
mapfile -t wanted < <(wanted_tensorflow)
((${#wanted[@]} < 2)) || fail "'$extras' brings ${wanted[*]}, which overwrite each other's files: choose one of cpu, cuda and tpu"

venv="${VENV:-$root/.venv}"
python="$venv/bin/python"

if [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" ]] && [[ -n "$(ls -A "$venv")" ]]; then
  fail "VENV=$venv exists and is not a virtual environment; name another folder"
fi
if ! { [[ -x "$python" ]] && "$python" -m pip --version >/dev/null 2>&1; }; then
  base="$(find_python)"
  need_ensurepip "$base"
  run "$base" -m venv "$venv"
elif ! supported "$python"; then
  fail "$venv holds $("$python" --version), not one from 3.$oldest to 3.13$because; remove it or set VENV=DIR"
fi

constraints=()
if [[ -n "${CONSTRAINTS:-}" ]]; then
  [[ -f "$CONSTRAINTS" ]] || fail "CONSTRAINTS=$CONSTRAINTS: there is no such file; constraints.txt beside setup.py is one"
  constraints=(--constraint "$CONSTRAINTS")
fi

# What was installed, and from what: the same again is nothing to do. The extra `test` brings cpu and demo along.
state="$(cd -- "$root" && printf '%s\n' "$root" | cat - setup.py pyproject.toml)$([[ -z "${CONSTRAINTS:-}" ]] || cat -- "$CONSTRAINTS")"
state="$(printf '%s\n' "$state" | sha256sum | cut -d ' ' -f 1)"
covering=("$extras")
[[ "$extras" =~ ^(cpu|demo|cpu,demo)$ ]] && covering+=(test)
for each in "${covering[@]}"; do
  stamp="$venv/launcher-$each.installed"
  if [[ -f "$stamp" && "$(<"$stamp")" == "$state" ]]; then
    exit 0
  fi
done

# Two would overwrite each other's files, and taking one away would break what the environment is for.
if ((${#wanted[@]})); then
  there="$(installed_tensorflow)"
  [[ -z "$there" || "$there" == "${wanted[0]}" ]] ||
    fail "$venv has $there, and '$extras' would bring ${wanted[0]}, which overwrites its files. Make another environment:" \
      "VENV=$venv-${extras%%,*}; or replace it: $python -m pip uninstall -y $there, then run this again"
fi

install=("$python" -m pip install --disable-pip-version-check --progress-bar off --quiet)
run "${install[@]}" --upgrade pip # the one that comes with Python 3.10 does not find the versions that fit, for hours
export PYTHONWARNINGS=ignore # setuptools warns at length of every editable installation
run "${install[@]}" "${constraints[@]}" -e "${root}[${extras}]"
((${#wanted[@]})) || [[ -n "$(installed_tensorflow)" ]] ||
  printf "note: '%s' brings no TensorFlow, without which nothing trains: add cpu, cuda or tpu\n" "$extras" >&2
[[ "$(cd -- "$root" && basename -- "$PWD")" != launcher ]] ||
  printf 'note: programs beside this folder take it for the package, as it is called launcher: give it another name\n' >&2
if [[ -z "$dry_run" ]]; then
  printf '%s\n' "$state" >"$venv/launcher-$extras.installed"
fi
