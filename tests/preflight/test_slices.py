"""Accelerator types: the slices that Google lists, their sizes, and what is said to somebody who asks for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from launcher.errors import UsageError
from launcher.machine.accelerators import CHIPS, constants_of
from launcher.preflight.slices import SLICES, find

# Chips, replicas of TPUStrategy, hosts: https://cloud.google.com/tpu/docs, the pages of the generations.
PUBLISHED = {
    "v2-8": (4, 8, 1), "v2-512": (256, 512, 64),
    "v3-8": (4, 8, 1), "v3-32": (16, 32, 4), "v3-2048": (1024, 2048, 256),
    "v4-8": (4, 4, 1), "v4-32": (16, 16, 4), "v4-4096": (2048, 2048, 512),
    "v5litepod-1": (1, 1, 1), "v5litepod-4": (4, 4, 1), "v5litepod-8": (8, 8, 1), "v5litepod-16": (16, 16, 4),
    "v5litepod-256": (256, 256, 64),
    "v5p-8": (4, 4, 1), "v5p-12288": (6144, 6144, 1536),
    "v6e-1": (1, 1, 1), "v6e-8": (8, 8, 1), "v6e-16": (16, 16, 4), "v6e-256": (256, 256, 64),
}  # fmt: skip


def test_slices_have_the_published_numbers_of_chips_replicas_and_hosts():
    found = {name: (SLICES[name].num_chips, SLICES[name].num_replicas, SLICES[name].num_hosts) for name in PUBLISHED}
    assert found == PUBLISHED


def test_the_compiler_knows_a_topology_for_each_family_with_as_many_devices_and_hosts():
    names = [name for name in SLICES if SLICES[name].num_chips <= 512]
    program = (
        "import json, sys\n"
        "from jax.experimental import topologies\n"
        "for topology in json.load(sys.stdin):\n"
        "    devices = topologies.get_topology_desc(platform='tpu', **topology).devices\n"
        "    print(len(devices), len({device.process_index for device in devices}))\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([SLICES[name].compile_request()["topology"] for name in names]),
        capture_output=True,
        text=True,
        env=environ,
        check=True,
        timeout=240,
    )
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert found == [(SLICES[name].num_replicas, SLICES[name].num_hosts) for name in names]


@pytest.mark.parametrize(
    ("asked", "offered"),
    [
        ("v5litpod-16", "did you mean 'v5litepod'"),
        ("v5litepod-100", "no such slice of v5litepod; the nearest is v5litepod-128"),
        ("v4-31", "no such slice of v4; the nearest is v4-32"),
        ("v3", "no such slice of v3. Listed: v3-8, v3-32"),
        ("v5p-100000", "the nearest is v5p-17920"),
        ("tpu7x-8", "TensorFlow does not support TPU7x (Ironwood)"),
        ("v7x-256", "TensorFlow does not support TPU7x (Ironwood)"),
        ("h100", "known: v2, v3, v4, v5litepod, v5p, v6e"),
    ],
)
def test_a_type_that_is_not_listed_is_refused_with_the_nearest_that_is(asked, offered):
    with pytest.raises(UsageError) as refusal:
        find(asked)
    assert f"--tpu_type={asked}: " in str(refusal.value)
    assert offered in str(refusal.value)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("v5e-256", "v5litepod-256"), ("V4-32", "v4-32"), ("tpu-v4-32", "v4-32"), (" v6e-8", "v6e-8"), ("v5-8", "v5p-8")],
)
def test_a_slice_is_known_by_what_it_is_called_elsewhere(asked, found):
    assert find(asked) is SLICES[found]


def test_links_of_a_corner_count_two_along_a_closed_axis_and_one_along_an_open_one():
    links = {name: SLICES[name].links for name in ("v5litepod-1", "v5litepod-64", "v5litepod-128", "v5litepod-256")}
    assert links == {"v5litepod-1": 0, "v5litepod-64": 2, "v5litepod-128": 3, "v5litepod-256": 4}
    assert {name: SLICES[name].links for name in ("v4-8", "v4-64", "v4-128")} == {"v4-8": 2, "v4-64": 3, "v4-128": 6}


def test_every_constant_of_every_chip_names_its_source():
    constants = [constant for chip in CHIPS.values() for constant in constants_of(chip).values()]
    assert len(constants) == 4 * len(CHIPS)
    assert all(constant.value > 0 and len(constant.source) > 10 for constant in constants)


def test_clocks_that_follow_from_the_peaks_are_the_published_ones():
    # 700, 940 and 1050 MHz: Jouppi et al. 2020 and 2023, table of features.
    assert CHIPS["v2"].clock == pytest.approx(700e6, rel=0.01)
    assert CHIPS["v3"].clock == pytest.approx(940e6, rel=0.01)
    assert CHIPS["v4"].clock == pytest.approx(1050e6, rel=0.01)


def test_the_scripts_for_cloud_tpu_read_every_listed_slice_as_preflight_does():
    program = """
        set -euo pipefail
        source scripts/tpu_types.bash
        while read -r type; do
          read_type "$type"
          printf '%s %s %s %s\\n' "$type" "$tpu_family" "$tpu_replicas" "$tpu_hosts"
        done
    """
    done = subprocess.run(
        ["bash", "-c", program],
        input="".join(f"{name}\n" for name in SLICES),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    expected = [f"{name} {one.chip.family} {one.num_replicas} {one.num_hosts}" for name, one in SLICES.items()]
    assert done.stdout.splitlines() == expected
