from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from launcher.data.text import vocabulary as vocabulary_module
from launcher.data.text.vocabulary import BEGIN, END, PADDING, Vocabulary, cached_vocabulary, check_size
from launcher.errors import UsageError

LINES = [f"Zeile {number} und line {number * 7}:\n    for x in range({number})" for number in range(400)]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(LINES, size=330)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
@settings(max_examples=150, derandomize=True)
def test_any_text_comes_back_as_it_was(vocabulary, texts):
    assert vocabulary.decode(vocabulary.encode(texts)) == texts


@given(texts=st.lists(st.text(st.sampled_from("ei 1:\n\t▁\x1aéX"), max_size=30), max_size=4))
@settings(max_examples=150, derandomize=True)
def test_sequences_have_the_ids_of_whole_texts(vocabulary, texts):
    texts += LINES[: 3 * len(texts)]
    found = vocabulary.sequences(texts)
    parts = np.split(found.tokens, np.cumsum(found.lengths))[:-1]
    assert [part.tolist() for part in parts] == vocabulary.encode(texts)


def test_words_are_forgotten_before_they_take_much_memory(monkeypatch):
    monkeypatch.setattr(vocabulary_module, "_MAX_WORDS", 5)
    few = Vocabulary.train(LINES, size=330)
    found = [few.sequences(LINES[start : start + 3]).tokens.tolist() for start in (0, 3, 6)]
    whole = [few.encode(LINES[start : start + 3]) for start in (0, 3, 6)]
    assert found == [[*itertools.chain.from_iterable(ids)] for ids in whole]


@pytest.mark.parametrize(
    "text",
    ["", " ", "  a ", "\n\n\tx\r\n", "▁", "a▁\x1ab\x1a1", "\0", "<s>", "<0x41>", "</s>", "<pad>", "<unk>", "é😀"],
)
def test_texts_that_look_like_sentencepieces_own_marks_come_back(vocabulary, text):
    (ids,) = vocabulary.encode([text])
    assert vocabulary.decode([ids]) == [text]
    assert min(ids, default=9) > END  # nothing unknown, nothing special


def test_decoding_stops_at_the_end_and_leaves_out_padding(vocabulary):
    (ids,) = vocabulary.encode(["line 7"])
    assert vocabulary.decode([[BEGIN, *ids, END, *ids, PADDING]]) == ["line 7"]
    assert vocabulary.decode([]) == []


def test_the_same_texts_give_the_same_vocabulary_of_the_size_asked_for(vocabulary):
    assert Vocabulary.train(LINES, size=330).model_bytes == vocabulary.model_bytes
    assert Vocabulary(vocabulary.model_bytes).size == vocabulary.size == 330


def test_a_size_that_the_text_cannot_give_says_which_it_can():
    with pytest.raises(
        UsageError, match=r"no vocabulary of vocab_size = 5000 .*: Vocabulary size too high .* value <= \d+"
    ):
        Vocabulary.train(LINES, size=5000)


def test_a_size_without_room_for_the_characters_says_how_many_there_are():
    with pytest.raises(
        UsageError, match=r"no vocabulary of vocab_size = 262 .*: Vocabulary size is smaller than required_chars"
    ):
        Vocabulary.train(LINES, size=262)


def test_a_size_without_room_for_bytes_is_refused():
    with pytest.raises(UsageError, match=r"text_pairs\.vocab_size = 200 is too small"):
        check_size(200, "text_pairs.vocab_size")


def test_a_large_text_is_thinned_evenly_and_always_the_same():
    texts = [str(number) for number in range(1000)]
    thinned = vocabulary_module._thinned(texts, 100)
    assert thinned == vocabulary_module._thinned(texts, 100)
    assert 50 <= len(thinned) <= 100
    assert {int(b) - int(a) for a, b in itertools.pairwise(thinned)} == {16}


def test_a_vocabulary_is_trained_once_and_then_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    first = cached_vocabulary("tfds:a/b", "digest", size=330, texts=lambda: LINES)
    again = cached_vocabulary("tfds:a/b", "digest", size=330, texts=lambda: pytest.fail("trained again"))
    assert again.model_bytes == first.model_bytes
    other = cached_vocabulary("tfds:a/b", "another digest", size=330, texts=lambda: LINES[:300])
    assert other.model_bytes != first.model_bytes
    assert len(list((tmp_path / "text").iterdir())) == 2


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=f"--data_dir={tmp_path}/file cannot be written"):
        cached_vocabulary("a", "digest", size=330, texts=lambda: LINES)


@pytest.mark.parametrize("module", ["sentencepiece"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=r"text_pairs needs sentencepiece.*pip install .*\[text\]"):
        vocabulary_module.module("text_pairs")


_RACER = """
import sys
from launcher.data.text import storage
from launcher.data.text.vocabulary import Vocabulary, cached_vocabulary
import numpy as np

def texts():
    print("making", flush=True)
    sys.stdin.readline()  # both have found nothing before either goes on
    return [f"Zeile {number}" for number in range(300)]

def rows():
    print("making", flush=True)
    sys.stdin.readline()
    return {"tokens": np.arange(12).reshape(3, 4)}, {"dropped": 1}

print(len(cached_vocabulary("race", "d", size=290, texts=texts).model_bytes), flush=True)
arrays, facts = storage.stored_rows(storage.folder() / "race", rows)
print(arrays["tokens"].sum(), facts, flush=True)
"""


@pytest.mark.heavy
def test_processes_that_race_end_with_one_whole_vocabulary_and_one_set_of_rows(tmp_path):
    environment = {**os.environ, "TFDS_DATA_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        ends = []
        for _ in range(2):
            assert [racer.stdout.readline() for racer in racers] == ["making\n"] * 2
            for racer in racers:
                racer.stdin.write("\n")
                racer.stdin.flush()
            ends.append([racer.stdout.readline() for racer in racers])
        assert [racer.wait(timeout=120) for racer in racers] == [0, 0]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    (sizes, sums), folder = ends, tmp_path / "text"
    assert sizes[0] == sizes[1] and sums == ["66 {'dropped': 1}\n"] * 2
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".model"]  # nothing half-done is left
