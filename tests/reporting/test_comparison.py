"""--mode=compare: runs beside one another, from their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_page import Page

from launcher import main as entry
from launcher.reporting import run_folder
from launcher.reporting.metrics_file import MetricsFile
from launcher.reporting.run_folder import RunRecord

BEGAN = 1_700_000_000.0


def trained(folder: Path, *, rate: float, accuracy: float, config: str) -> Path:
    """A folder of a run of 20 steps, one a second."""
    record = RunRecord(
        started=BEGAN,
        recipe=("some.gin",),
        plan={"strategy": "one_device", "seed": "0", "cluster": f"worker 0 of localhost:{2000 + hash(folder) % 1000}"},
        best_metric="accuracy",
    )
    run_folder.write_record(folder, record)
    now = [BEGAN]
    metrics = MetricsFile(str(folder), clock=lambda: now[0])
    for step in (10, 20):
        now[0] = BEGAN + step
        metrics.append("train", {"step": step, "loss": rate / step})
        metrics.append("eval", {"step": step, "accuracy": accuracy - (20 - step) / 100})
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "step": 20, "versions": {"keras": "3"}}))
    (folder / "config.gin").write_text(f"# Parameters for momentum:\nmomentum.momentum = 0.9\n{config}")
    return folder


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, list[str]], Page]:
    """The rows of the table on the terminal, and the page, of two runs that differ in little."""
    runs = (
        trained(tmp_path / "one" / "run", rate=1.0, accuracy=0.9, config="cosine.peak = 0.1\n"),
        trained(
            tmp_path / "other" / "run",
            rate=2.0,
            accuracy=0.8,
            config="cosine.peak = \\\n    0.2\nlamb.beta_1 = 0.8\nverify.steps = 3\n",
        ),
    )
    one, other = map(str, runs)
    assert entry.main(["launcher", "--mode=compare", one, other, f"--model_dir={tmp_path / 'out'}"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}
    return rows, Page.of(tmp_path / "out", "compare.html")


def test_the_table_has_the_results_and_what_differs(compared: tuple[dict[str, list[str]], Page]) -> None:
    rows, page = compared
    assert rows[""] == ["one/run", "other/run"], "names that tell them apart"
    assert rows["best accuracy"] == ["0.9 at step 20", "0.8 at step 20"]
    assert rows["wall time"] == ["20.0 s", "20.0 s"]
    assert rows["seconds to best"] == ["20", "20"]
    assert rows["cosine.peak"] == ["0.1", "0.2"]
    assert not {"momentum.momentum", "verify.steps", "seed", "keras", "cluster"} & set(rows), (
        "what is the same, or of other modes"
    )
    assert rows["lamb.beta_1"] == ["-", "0.8"]
    assert "lamb.beta_1 - 0.8" in page.section("What differs")
    results = page.section("Results")
    assert "run cosine.peak status best accuracy" in results, "a row a run"
    assert "one/run (best) 0.1 completed 0.9 at step 20" in results and "other/run 0.2 completed 0.8" in results


def test_the_curves_lie_over_one_another(compared: tuple[dict[str, list[str]], Page]) -> None:
    _, page = compared
    (loss,) = [one for one in page.data["panels"]["curves"] if one["title"] == "Loss"]
    assert [(one["label"], one["y"]) for one in loss["series"]] == [("one/run", [0.1, 0.05]), ("other/run", [0.2, 0.1])]
    assert len({one["color"] for one in loss["series"]}) == 2
    assert page.links == []


def test_the_terminal_shows_five_runs_and_the_page_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"rate={rate}" for rate in range(1, 8)]
    runs = [str(trained(tmp_path / name, rate=1.0, accuracy=0.9, config="")) for name in names]
    assert entry.main(["launcher", "--mode=compare", *runs, f"--model_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == names[:5] and max(map(len, lines[:-1])) <= 80
    assert all(name in Page.of(tmp_path, "compare.html").section("Results") for name in names)
