"""`train.attention` on the command line: what the plan says of it, and what is refused."""

from __future__ import annotations

import pytest

from launcher import main as entry


@pytest.fixture
def dry_run(capsys, tmp_path, monkeypatch):
    """dry_run(recipe, *bindings): (exit code, the plan's line on attention, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))

    def run(recipe, *bindings):
        flags = [f"--gin_param={binding}" for binding in bindings]
        code = entry.main(["launcher", f"--gin_file={recipe}", "--dry_run", *flags])
        out, err = capsys.readouterr()
        return code, next((line for line in out.splitlines() if line.startswith("attention")), ""), err

    return run


SMALL = ("language_model.layers = 1", "language_model.width = 24")


@pytest.mark.parametrize(
    ("recipe", "bindings", "told"),
    [
        ("lm_cpu.gin", SMALL, "plain (auto: blocks from 1,024 x 1,024 tokens on a CPU)"),
        (
            "lm_cpu.gin",
            (*SMALL, "text_corpus.length = 2048", "language_model.max_length = 2048"),
            "blocks of 512 x 512 tokens, 2 rows at a time (auto: blocks from 1,024 x 1,024 tokens on a CPU)",
        ),
        ("lm_cpu.gin", (*SMALL, "train.attention = 'blocks'"), "blocks of 512 x 512 tokens, 2 rows at a time"),
        (
            "lm_long_tpu.gin",
            ("language_model.layers = 1", "text_corpus.vocab_size = 512"),
            "blocks of 1024 x 1024 tokens, 1 row at a time (auto: blocks from 512 x 512 tokens on a TPU)",
        ),
        (
            "transformer_cpu.gin",
            ("text_pairs.row_length = 1400", "transformer.layers = 1", "transformer.max_length = 1400"),
            "blocks of 512 x 512 tokens, 4 rows at a time (auto",
        ),
    ],
)
def test_the_plan_tells_the_form_and_why(dry_run, recipe, bindings, told):
    code, line, err = dry_run(recipe, *bindings)
    assert code == 0, err
    assert told in line


def test_a_model_without_attention_has_no_line(dry_run):
    assert dry_run("resnet_cpu.gin", "resnet.depth = 8")[:2] == (0, "")


@pytest.mark.parametrize(
    ("recipe", "form", "message"),
    [
        ("lm_cpu.gin", "ring", "train.attention = 'ring': must be one of 'auto', 'plain', 'blocks'"),
        (
            "resnet_cpu.gin",
            "blocks",
            "train.attention = 'blocks': only for attention of models.transformer",
        ),
    ],
)
def test_a_form_that_cannot_be_is_refused(dry_run, recipe, form, message):
    small = SMALL if recipe == "lm_cpu.gin" else ("resnet.depth = 8",)
    code, _, err = dry_run(recipe, *small, f"train.attention = '{form}'")
    assert code == 64
    assert message in err
    assert "Traceback" not in err
