"""Environment variables that change what Keras and TensorFlow do."""

import json
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.doctor.check import FAIL, Context, Finding, check, fail, ok, warn

# What each variable does where its value is wrong, or not right, as patterns say.
_KNOWN = json.loads(Path(__file__).with_name("variables.json").read_text("utf-8"))


@check("environment variables that get in the way")
def variables(context: Context) -> Iterator[Finding]:
    yield from [*_mistakes(context.environ)] or [ok("none that gets in the way")]


def _mistakes(environ: Mapping[str, str]) -> Iterator[Finding]:
    for known in _KNOWN:
        name = known["variable"]
        # Of these, oneDNN is on by default on x86 alone.
        if name == "TF_ENABLE_ONEDNN_OPTS" and platform.machine() not in ("x86_64", "AMD64"):
            continue
        value = environ.get(name, "")
        if value and bool(re.fullmatch(known.get("wrong") or known["right"], value)) == ("wrong" in known):
            yield (fail if known["status"] == FAIL else warn)(f"{name}={value}: {known['effect']}", known["fix"])
