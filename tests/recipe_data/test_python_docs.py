from __future__ import annotations

import pytest

from launcher.data.text.corpus import TextCorpus
from launcher.errors import UsageError
from launcher.gin_configs.data import python_docs
from launcher.gin_configs.data.python_docs import PythonDocs, is_held_out


@pytest.fixture(scope="module")
def docs():
    return PythonDocs()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of a few files."""
    files = {
        "shown.py": '"""About shown.\n\n    Indented.\n    """\ndef f():\n    """Says it."""\n'
        'class C:\n    """One class."""\n    def m(self):\n        """Same."""\n',
        "queue.py": '"""About queue."""\ndef g():\n    """Same."""\nasync def h():\n    """Only here."""\n',
        "broken.py": "def (",
        "empty.py": "x = 1\n",
        "test/test_shown.py": '"""A test."""\n',
        "site-packages/other.py": '"""Another package."""\n',
        "json/__init__.py": '"""A package."""\n',
        "pydoc_data/topics.py": "# A comment\ntopics = {'if': 'The if statement\\n', 'in': 'The if statement\\n'}\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(python_docs, "_library", lambda: tmp_path)
    return tmp_path


def test_a_module_is_a_document_of_its_docstrings(library):
    assert list(PythonDocs().train()) == [
        "json\nA package.\n",
        "shown\nAbout shown.\n\nIndented.\n\nshown.f\nSays it.\n\nshown.C\nOne class.\n\nshown.C.m\nSame.\n",
        "help('in')\nThe if statement\n",
    ]


def test_what_a_training_module_says_is_taken_out_of_the_held_out_ones(library):
    assert is_held_out("queue") and not is_held_out("shown")
    assert list(PythonDocs().held_out()) == ["queue\nAbout queue.\n\nqueue.h\nOnly here.\n"]


def test_another_text_is_another_set(library):
    before = PythonDocs().digest()
    assert PythonDocs().digest() == before
    (library / "shown.py").write_text('"""Changed."""\n')
    assert PythonDocs().digest() != before


def test_a_python_without_its_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs, "_library", lambda: tmp_path)
    with pytest.raises(UsageError, match=f"this Python has none in {tmp_path}"):
        PythonDocs().check()


@pytest.mark.heavy
@pytest.mark.nightly  # of the whole library what is asserted of a small one
def test_this_pythons_library_gives_two_parts_that_share_no_docstring(docs):
    train, held_out = docs._modules
    packages = [{name.split(".")[0].lstrip("_") for name in part} for part in (train, held_out)]
    assert not packages[0] & packages[1] and len(packages[1]) >= 8
    assert not {text for entries in train.values() for _, text in entries} & {
        text for entries in held_out.values() for _, text in entries
    }
    sizes = [sum(len(text.encode()) for text in texts) for texts in (docs.train(), docs.held_out())]
    assert 1_200_000 < sizes[0] < 5_000_000
    assert 0.02 < sizes[1] / sum(sizes) < 0.12


def test_a_bound_name_goes_before_the_source_of_a_recipe(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    data = TextCorpus(name=f"lines:{tmp_path}/a.txt", source=PythonDocs(), vocab_size=300, length=32)
    assert data.name == f"lines:{tmp_path}/a.txt"
    with pytest.raises(UsageError, match=r"required and not bound: text_corpus.source, or text_corpus.name"):
        TextCorpus(vocab_size=300, length=32)
