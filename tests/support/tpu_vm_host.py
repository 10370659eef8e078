"""A host of a Cloud TPU as its start-up script finds it: a git repository or a folder as a bucket, files as devices,
and a launcher that ends as it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import psutil
from places import ROOT

SCRIPT = ROOT / "scripts" / "tpu_vm_startup.sh"

# What the checkout installs: an interpreter whose launcher.main notes how it was called and ends as `plan` says, a word
# a run: an exit code, or "hold" to wait for SIGTERM and then save and, when it is not "busy", end with 42.
PYTHON = r"""#!/usr/bin/env bash
here=NOTES
case "$1 $2" in
  "-c import libtpu"*) echo /lib/fake_libtpu.so; exit ;;
  "-m launcher.main" | "-m launcher.launch") ;;
  *) exec REAL "$@" ;;
esac
{ printf "${2#launcher.}"; printf ' %q' "${@:3}"; printf '\n'; } >>"$here/calls"
printf '%s\n' "cwd=$PWD" "TPU_NAME=${TPU_NAME-}" "TPU_LOAD_LIBRARY=${TPU_LOAD_LIBRARY-}" "TF_CONFIG=${TF_CONFIG-}" \
  "TF_PLUGGABLE_DEVICE_LIBRARY_PATH=${TF_PLUGGABLE_DEVICE_LIBRARY_PATH-}" >"$here/environment"
for word in "$@"; do
  case "$word" in --model_dir=*) model_dir="${word#*=}" ;; esac
done
mkdir -p "$model_dir/checkpoints"
ls "$model_dir/checkpoints" >"$here/found"
touch "$model_dir/checkpoints/step_$(wc -l <"$here/calls")" "$model_dir/checkpoints/step_9.writing-x"
read -r turn <"$here/plan"
sed -i 1d "$here/plan"
if [[ "$turn" == hold ]]; then
  trap 'echo TERM >>"$here/calls"; touch "$model_dir/checkpoints/saved"' TERM
  echo $$ >"$here/holding"
  until [[ -e "$model_dir/checkpoints/saved" && ! -e "$here/busy" ]]; do sleep 0.05; done
  exit 42
fi
echo "line of the launcher"
exit "$turn"
"""
INSTALL = r"""#!/usr/bin/env bash
set -euo pipefail
printf 'install %s %s\n' "$1" "$(cat "${PIP_CONSTRAINT:-/dev/null}")" >>NOTES/calls
printf '%s\n%s\n' "${PYTHON-}" "${PIP_FIND_LINKS-}" >NOTES/given
mkdir -p "$VENV/bin"
touch "$VENV/pyvenv.cfg"
if [[ -e NOTES/hang ]]; then
  echo $$ >NOTES/hanging
  while [[ -e NOTES/hang ]]; do sleep 0.05; done
fi
cp NOTES/python "$VENV/bin/python"
"""
# gs:// is a folder. As the real one, rsync copies into the destination, and ls refuses what is not there.
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>NOTES/gcloud
last="${@: -1}"; from="${@: -2:1}"
last="${last/#gs:\/\//BUCKETS/}"; from="${from/#gs:\/\//BUCKETS/}"
[[ ! -e NOTES/offline ]] || { echo "ERROR: (gcloud.storage) no network" >&2; exit 1; }
case "$2" in
  ls) [[ -e "$last" ]] || { echo "ERROR: (gcloud.storage.ls) One or more URLs matched no objects." >&2; exit 1; } ;;
  rsync)
    mkdir -p "$last"
    [[ "$*" == *--no-clobber* ]] && clobber=(--no-clobber) || clobber=()
    cp -R "${clobber[@]}" "$from/." "$last/"
    [[ "$*" != *--exclude=* ]] || find "$last" -name '*.writing-*' -delete ;;
  *) exit 99 ;;
esac
"""


class Host:
    """One host of a Cloud TPU, and what happened on it."""

    def __init__(self, folder):
        self.folder, self.home, self.notes = folder, folder / "home", folder / "notes"
        self.repository, self.buckets = folder / "repository", folder / "buckets"
        for path in (self.notes, self.buckets, folder / "bin"):
            path.mkdir()
        self.write(self.notes / "python", PYTHON)
        self.write(folder / "bin" / "gcloud", GCLOUD)
        self.write(self.repository / "scripts" / "install.sh", INSTALL)
        (folder / "accel0").touch()
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()
        self.plan("0")
        self.started = []

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, value in {"NOTES": self.notes, "BUCKETS": self.buckets, "REAL": sys.executable}.items():
            text = text.replace(name, str(value))
        path.write_text(text)
        path.chmod(0o755)

    def git(self, *arguments):
        who = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", self.repository, *who, *arguments], check=True, capture_output=True)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=x")

    def plan(self, *turns):
        (self.notes / "plan").write_text("".join(f"{turn}\n" for turn in turns))

    def start(self, *arguments, **environ):
        process = subprocess.Popen(
            [str(SCRIPT), *arguments],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "GIT_"))},
                "PATH": f"{self.folder / 'bin'}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                "LAUNCHER_HOME": str(self.home),
                "TPU_DEVICES": f"{self.folder}/accel*",
                **environ,
            },
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *arguments, **environ):
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def train(self, *arguments, **environ):
        flags = ("--", "--gin_file=resnet_tpu.gin", "--gin_param=train.steps = 30")
        return self.run(f"--source={self.repository}", *arguments, *flags, **environ)

    def close(self):
        for process in self.started:
            for member in psutil.process_iter():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    if os.getsid(member.pid) == process.pid:
                        member.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                stream.close()

    @property
    def status(self):
        return json.loads((self.home / "status.json").read_text())

    @property
    def calls(self):
        path = self.notes / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def environment(self):
        return dict(line.split("=", 1) for line in (self.notes / "environment").read_text().splitlines())

    @property
    def said_to_gcloud(self):
        return (self.notes / "gcloud").read_text().splitlines()
