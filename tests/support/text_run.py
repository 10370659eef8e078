"""Text small enough to train on in a test: letters to be spelled, as pairs and as running text, in files."""

from __future__ import annotations

import itertools
from pathlib import Path

SPELLED = dict(zip("abcdefgh", ("ay", "bee", "sea", "dee", "ee", "ef", "gee", "aitch"), strict=True))


def pairs() -> list[tuple[str, str]]:
    """Every word of up to three letters, and how it is spelled."""
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product(SPELLED, repeat=size)]
    return [(word, " ".join(["it", "is", *(SPELLED[letter] for letter in word)])) for word in words]


def write_pairs(folder: Path, *, held_out: int = 23) -> list[tuple[str, str]]:
    """Writes train and eval files; returns the held-out pairs."""
    every = pairs()
    kept = every[:: len(every) // held_out][:held_out]
    for name, part in (("train", [pair for pair in every if pair not in kept]), ("eval", kept)):
        (folder / f"{name}.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in part))
    return kept


def pair_bindings(folder: Path) -> list[str]:
    """A translation recipe's bindings for them: a model of a few thousand weights."""
    return [
        f"text_pairs.name = 'tsv:{folder}/train.tsv'",
        f"tsv_pairs.eval_files = '{folder}/eval.tsv'",
        "text_pairs.vocab_size = 290",
        "text_pairs.max_length = 20",
        "text_pairs.row_length = 40",
        "transformer.layers = 1",
        "transformer.width = 16",
        "transformer.heads = 2",
        "transformer.hidden = 32",
        "train.global_batch_size = 8",
        "train.log_every = 1",
        "train.steps_per_loop = 4",
        "train.evaluate_every = 0",
    ]


def write_corpus(folder: Path) -> None:
    """Sentences of the same words, one a line."""
    lines = [f"{word}: {spelled}." for word, spelled in pairs()]
    (folder / "train.txt").write_text("\n".join(line for index, line in enumerate(lines) if index % 20) + "\n")
    (folder / "eval.txt").write_text("\n".join(lines[::20]) + "\n")


def corpus_bindings(folder: Path) -> list[str]:
    return [
        f"text_corpus.name = 'lines:{folder}/train.txt'",
        f"lines_corpus.eval_files = '{folder}/eval.txt'",
        "text_corpus.vocab_size = 290",
        "text_corpus.length = 32",
        "text_corpus.eval_context = 0",
        "language_modelling.max_new_tokens = 12",
        "language_model.layers = 1",
        "language_model.width = 16",
        "language_model.heads = 2",
        "language_model.kv_heads = 1",
        "language_model.hidden = 32",
        "train.global_batch_size = 8",
        "train.log_every = 1",
        "train.steps_per_loop = 4",
        "train.evaluate_every = 0",
    ]
