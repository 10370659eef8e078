from __future__ import annotations

import json

import pytest

from launcher.data.text.corpus import text_corpus
from launcher.data.text.pairs import text_pairs
from launcher.data.text.patterns import PatternTexts, pair_of_columns, pair_of_fields, text_of_field, text_of_line
from launcher.errors import UsageError

LINES = [f"line {number} of some" for number in range(200)]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes files into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(**contents: str | bytes) -> None:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def texts(name: str, read, *, eval_files: str | None = None, eval_share: float | None = None) -> PatternTexts:
    return PatternTexts(name, binding="text_corpus", read=read, eval_files=eval_files, eval_share=eval_share)


def test_lines_of_all_files_are_documents_in_the_order_of_the_names(written, tmp_path):
    written(b="third\r\nfourth", a="first\n\nsecond\n", c="fifth\n")
    assert list(texts("lines:[ab]", text_of_line, eval_share=0).train()) == ["first", "second", "third", "fourth"]
    found = texts("lines:[ab]", text_of_line, eval_files=f"{tmp_path}/c")
    assert list(found.held_out()) == ["fifth"] and len(list(found.train())) == 4


def test_a_text_stays_held_out_wherever_it_stands(written):
    written(a="\n".join(LINES), b="\n".join(["new", *reversed(LINES), "newer"] * 2))
    held_out, more = (set(texts(f"lines:{name}", text_of_line).held_out()) for name in "ab")
    assert 5 < len(held_out) < 50 and held_out <= more and len(more - held_out) <= 2
    assert not held_out & set(texts("lines:a", text_of_line).train())


def test_columns_and_fields_are_pairs(written):
    rows = [("one", "eins"), ("", "nichts"), ("two", "zwei")]
    written(
        two="".join(f"{source}\t{target}\n" for source, target in rows) + "\n",
        four="".join(f"7\t{source}\tCC-BY\t{target}\n" for source, target in rows),
        json="\n".join(json.dumps({"id": 1, "translation": {"en": en, "de": de}}) for en, de in rows) + "\n",
    )
    wanted = [("one", "eins"), ("two", "zwei")]
    fields = pair_of_fields("translation.en", "translation.de")
    for name, read in (("two", pair_of_columns(None)), ("four", pair_of_columns((1, 3))), ("json", fields)):
        assert list(texts(f"any:{name}", read, eval_share=0).train()) == wanted


@pytest.mark.parametrize(
    ("content", "read", "words"),
    [
        ("a\tb\nno tab\n", pair_of_columns(None), "line 2: 1 columns, and a pair has two"),
        ("a\tb\tc\n", pair_of_columns(None), r"line 1: 3 columns.*bind text_pairs.columns, such as \(0, 1\)"),
        ("a\tb\tc\n\na\tb\n", pair_of_columns((0, 2)), r"line 3: 2 columns, and text_pairs.columns = \(0, 2\)"),
        ('{"text": "a"}\n{"text": "b"\n', text_of_field("text"), "line 2: not JSON: Expecting ',' delimiter at char"),
        ('{"txt": "a", "id": 3}\n', text_of_field("text"), "line 1: no field 'text': there is id, txt"),
        ('["a"]\n', text_of_field("text"), "line 1: no field 'text': there is no object but list"),
        ('{"text": 3}\n', text_of_field("text"), "line 1: field 'text' is no text but int"),
        (b"good\ncaf\xe9\n", text_of_line, "is not UTF-8: line 2"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(written, content, read, words):
    written(file=content)
    with pytest.raises(UsageError, match=f"file .*{words}"):
        list(texts("any:file", read, eval_share=0).train())


def test_another_content_another_field_and_another_share_are_another_set(written):
    def digest(**options):
        source = {"read": text_of_line, "fields": ["text"], "eval_files": None, "eval_share": None, **options}
        return PatternTexts("lines:a", binding="text_corpus", **source).digest()

    written(a="one\n")
    before = digest()
    assert before == digest() != digest(eval_share=0.5)
    assert before != digest(fields=["title"])
    written(a="two\n")
    assert before != digest()


def test_own_texts_train_and_evaluate(written):
    written(
        a="\n".join(LINES),
        tsv="\n".join(f"{line}\t{line.replace('line', 'Zeile')}" for line in LINES),
        json="\n".join(json.dumps({"body": line}) for line in LINES),
    )
    for corpus in (
        text_corpus(name="lines:a", vocab_size=290, length=16),
        text_corpus(name="jsonl:json", vocab_size=290, length=16, text_feature="body"),
        text_pairs(name="tsv:tsv", vocab_size=290, max_length=24, eval_share=0.2),
    ):
        corpus.check()
        assert corpus.num_train_examples > corpus.num_eval_examples > 0
        assert corpus.details.endswith("0% held out by a hash of the text")


def test_what_means_nothing_to_a_set_or_matches_nothing_is_refused(written, tmp_path):
    with pytest.raises(UsageError, match=rf"text_corpus.name: no file matches 'no\*' \(from {tmp_path}\)"):
        text_corpus(name="lines:no*", vocab_size=290, length=16).check()
    for make, options, words in (
        (text_corpus, {"name": "files", "eval_share": 0.1}, "eval_share is for .*'lines:GLOB' or 'jsonl:GLOB'"),
        (text_corpus, {"name": "lines:a", "text_feature": "b"}, "text_feature is for .*'tfds:NAME' or 'jsonl:GLOB'"),
        (text_corpus, {"name": "lines:a", "eval_share": 0.1, "eval_files": "b"}, "eval_files has those"),
        (text_corpus, {"name": "line:a"}, "did you mean 'lines:'"),
        (text_pairs, {"name": "jsonl:a", "columns": (0, 1)}, "columns is for .*'tsv:GLOB'"),
    ):
        size = {"length": 16} if make is text_corpus else {"max_length": 16}
        with pytest.raises(UsageError, match=words):
            make(vocab_size=290, **size, **options)
