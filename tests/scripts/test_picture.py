"""The README's picture shows the frames of a terminal in their order, and the last one where nothing may move."""

from __future__ import annotations

import importlib.util
from xml.etree import ElementTree

from places import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def test_each_row_is_shown_while_it_stands_and_the_last_frame_without_animation():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "scripts/picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)

    def frame(seconds, *rows, caption=0):
        return picture.Frame(seconds, tuple(((0, row, "#ffffff", False),) if row else () for row in rows), caption)

    frames = [frame(0, "a < b"), frame(1, "a < b", "step 1"), frame(3, "a < b", "step 2", caption=1)]
    root = ElementTree.fromstring(picture.drawn(frames, 4.0))
    groups = {"".join(group.itertext()): group for group in root.iter(f"{SVG}g")}
    assert {"a < b", "step 1", "step 2"} < set(groups)
    still = {text for text, group in groups.items() if "l" in group.get("class").split()}
    assert still == {"a < b", "step 2", f"2. {picture.CAPTIONS[1]}"}
    rules = root.find(f"{SVG}style").text
    name = groups["step 1"].get("style").removeprefix("animation-name:")
    assert f"@keyframes {name}{{0%{{opacity:0}}25.00%{{opacity:1}}75.00%{{opacity:0}}}}" in rules
    assert picture.program().startswith("import keras")
