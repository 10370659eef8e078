"""Scripts of Cloud TPUs by stand-ins: for gcloud, and for the host of a node."""

from __future__ import annotations

import os
import subprocess

import pytest
from places import ROOT
from recorded_gcloud import Gcloud
from tpu_vm_host import Host


@pytest.fixture
def gcloud(tmp_path):
    return Gcloud(tmp_path / "bin")


@pytest.fixture
def run(tmp_path, gcloud):
    """run(script, *arguments, stdin=""): runs it with the stand-in on PATH; PYTHON looks at flags of the node."""

    def call(script, *arguments, stdin="", path=None, PYTHON="true"):
        return subprocess.run(
            [str(ROOT / "scripts" / script), *arguments],
            env={**os.environ, "PYTHON": PYTHON, "PATH": path or f"{gcloud.folder}:{os.environ['PATH']}"},
            cwd=tmp_path, input=stdin, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return call


@pytest.fixture
def host(tmp_path):
    one = Host(tmp_path)
    yield one
    one.close()
