from __future__ import annotations

import pytest
from sources import made

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.files import FilePairs
from launcher.data.text.pairs import TextPairs
from launcher.errors import UsageError


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file into the working directory, and says its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes) -> str:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def pairs(**options) -> FilePairs:
    return FilePairs(source_file="s", target_file="t", **options)


def test_line_n_translates_line_n(written):
    written("s", "one\ntwo\u2028still two\n\nfour\r\nfive")
    written("t", "eins\nzwei\x0bnoch zwei\ndrei\nvier\nfünf\n")
    wanted = [("one", "eins"), ("two\u2028still two", "zwei\x0bnoch zwei"), ("four", "vier"), ("five", "fünf")]
    assert list(pairs().train()) == wanted
    assert list(pairs().held_out()) == []
    assert list(pairs(eval_source_file="s", eval_target_file="t").held_out()) == wanted


def test_files_of_different_length_are_refused_with_their_counts(written):
    written("s", "one\ntwo\n")
    written("t", "eins\n")
    with pytest.raises(UsageError, match="s has 2 lines and t 1"):
        list(pairs().train())


def test_a_file_that_is_not_utf_8_is_refused_with_the_line(written):
    written("s", b"one\ncaf\xe9\n")
    written("t", "eins\nzwei\n")
    with pytest.raises(UsageError, match="s is not UTF-8: line 2"):
        list(pairs().train())


def test_a_missing_file_is_named_before_anything_is_read(written, tmp_path):
    written("s", "one\n")
    data = made(TextPairs, name="files", vocab_size=300, max_length=8, source_file="s", target_file="no")
    with pytest.raises(UsageError, match=f"no cannot be read: No such file or directory \\(from {tmp_path}\\)"):
        data.check()


def test_another_content_is_another_set(written):
    written("s", "one\n")
    written("t", "eins\n")
    before = pairs().digest()
    assert pairs().digest() == before
    written("t", "zwei\n")
    assert pairs().digest() != before
    written("s", "one\nzw")  # the same bytes, cut elsewhere
    written("t", "ei\n")
    assert pairs().digest() != before


def test_files_train_and_evaluate(written):
    written("s", "".join(f"line {n} of many\n" for n in range(80)))
    written("t", "".join(f"Zeile {n} von vielen\n" for n in range(80)))
    data = made(TextPairs, name="files", vocab_size=290, max_length=24, source_file="s", target_file="t",
                      eval_source_file="s", eval_target_file="t")  # fmt: skip
    data.check()
    assert data.num_train_examples == data.num_eval_examples > 10
    assert data.eval_pairs[3] == ("line 3 of many", "Zeile 3 von vielen")
    corpus = made(TextCorpus, name="lines:s", vocab_size=290, length=16, eval_files="t")
    corpus.check()
    assert corpus.num_train_examples > 10 and 0.5 < corpus.bytes_per_token < 9
