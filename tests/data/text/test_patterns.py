from __future__ import annotations

import json
from functools import partial

import pytest
from sources import made

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs
from launcher.data.text.patterns import JsonlCorpus, JsonlPairs, LinesCorpus, TsvPairs
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


def test_lines_of_all_files_are_documents_in_the_order_of_the_names(written, tmp_path):
    written(b="third\r\nfourth", a="first\n\nsecond\n", c="fifth\n")
    assert list(LinesCorpus("[ab]", eval_share=0).train()) == ["first", "second", "third", "fourth"]
    written(d="two\u2028still two\n", e="zwei\x0bnoch zwei")  # what str.splitlines() would cut
    assert [*LinesCorpus("[de]", eval_share=0).train()] == ["two\u2028still two", "zwei\x0bnoch zwei"]
    found = LinesCorpus("[ab]", eval_files=f"{tmp_path}/c")
    assert list(found.held_out()) == ["fifth"] and len(list(found.train())) == 4


def test_a_text_stays_held_out_wherever_it_stands(written):
    written(a="\n".join(LINES), b="\n".join(["new", *reversed(LINES), "newer"] * 2))
    held_out, more = (set(LinesCorpus(name).held_out()) for name in "ab")
    assert 5 < len(held_out) < 50 and held_out <= more and len(more - held_out) <= 2
    assert not held_out & set(LinesCorpus("a").train())


def test_columns_and_fields_are_pairs(written):
    rows = [("one", "eins"), ("", "nichts"), ("two", "zwei")]
    written(
        two="".join(f"{source}\t{target}\n" for source, target in rows) + "\n",
        four="".join(f"7\t{source}\tCC-BY\t{target}\n" for source, target in rows),
        json="\n".join(json.dumps({"id": 1, "translation": {"en": en, "de": de}}) for en, de in rows) + "\n",
    )
    wanted = [("one", "eins"), ("two", "zwei")]
    fields = {"source_language": "translation.en", "target_language": "translation.de"}
    for pairs in (TsvPairs("two", eval_share=0), TsvPairs("four", columns=(1, 3), eval_share=0),
                  JsonlPairs("json", **fields, eval_share=0)):  # fmt: skip
        assert list(pairs.train()) == wanted


@pytest.mark.parametrize(
    ("content", "make", "words"),
    [
        ("a\tb\nno tab\n", TsvPairs, "line 2: 1 columns, and a pair has two"),
        ("a\tb\tc\n", TsvPairs, r"line 1: 3 columns.*bind tsv_pairs.columns, such as \(0, 1\)"),
        (
            "a\tb\tc\n\na\tb\n",
            partial(TsvPairs, columns=(0, 2)),
            r"line 3: 2 columns, and tsv_pairs.columns = \(0, 2\)",
        ),
        ('{"text": "a"}\n{"text": "b"\n', JsonlCorpus, "line 2: not JSON: Expecting ',' delimiter at char"),
        ('{"txt": "a", "id": 3}\n', JsonlCorpus, "line 1: no field 'text': there is id, txt"),
        ('["a"]\n', JsonlCorpus, "line 1: no field 'text': there is no object but list"),
        ('{"text": 3}\n', JsonlCorpus, "line 1: field 'text' is no text but int"),
        (b"good\ncaf\xe9\n", LinesCorpus, "is not UTF-8: line 2"),
    ],
)
def test_a_damaged_line_is_named_with_its_file(written, content, make, words):
    written(file=content)
    with pytest.raises(UsageError, match=f"file .*{words}"):
        list(make("file", eval_share=0).train())


def test_another_content_another_field_and_another_share_are_another_set(written):
    written(a="one\n")
    before = LinesCorpus("a").digest()
    assert before == LinesCorpus("a").digest() != LinesCorpus("a", eval_share=0.5).digest()
    assert JsonlCorpus("a").digest() != JsonlCorpus("a", text_feature="title").digest()
    written(a="two\n")
    assert before != LinesCorpus("a").digest()
    written(b="one\n", c="eins\n")
    before = LinesCorpus("[bc]").digest()
    written(b="one\nei", c="ns\n")  # the same bytes, cut elsewhere
    assert before != LinesCorpus("[bc]").digest()


def test_own_texts_train_and_evaluate(written):
    written(
        a="\n".join(LINES),
        tsv="\n".join(f"{line}\t{line.replace('line', 'Zeile')}" for line in LINES),
        json="\n".join(json.dumps({"body": line}) for line in LINES),
    )
    for corpus in (
        TextCorpus(name="lines:a", vocab_size=290, length=16),
        made(TextCorpus, name="jsonl:json", vocab_size=290, length=16, text_feature="body"),
        made(TextPairs, name="tsv:tsv", vocab_size=290, max_length=24, eval_share=0.2),
    ):
        corpus.check()
        assert corpus.num_train_examples > corpus.num_eval_examples > 0
        assert corpus.details.endswith("0% held out by a hash of the text")


def test_what_means_nothing_or_matches_nothing_is_refused(written, tmp_path):
    with pytest.raises(UsageError, match=rf"lines:no\*: no file matches 'no\*' \(from {tmp_path}\)"):
        TextCorpus(name="lines:no*", vocab_size=290, length=16).check()
    with pytest.raises(UsageError, match=r"lines_corpus\.eval_files: bind one"):
        LinesCorpus("a", eval_share=0.1, eval_files="b")
    with pytest.raises(UsageError, match=r"tsv_pairs\.eval_share = 2: must be"):
        TsvPairs("a", eval_share=2)
    with pytest.raises(UsageError, match="did you mean 'lines:'"):
        TextCorpus(name="line:a", vocab_size=290, length=16)
