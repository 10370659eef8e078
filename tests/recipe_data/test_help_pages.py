from __future__ import annotations

import json

import pytest

from launcher.data import prepare as program
from launcher.data import tfds
from launcher.data.text.pairs import TextPairs
from launcher.errors import EXIT_USAGE, UsageError
from launcher.gin_configs.data import help_pages
from launcher.gin_configs.data.__main__ import prepare as make
from launcher.gin_configs.data.help_html import paragraphs
from launcher.gin_configs.data.help_pages import HelpPages, align, is_held_out, prepare


def page(*body: str) -> str:
    """A page as the help has it around its paragraphs."""
    return (
        '<!DOCTYPE html><html><head><base href="../"><title>T</title><script>p = "<p id=\'par_0\'>"</script></head>'
        '<body><p id="bm_module" class="bug">debug</p><div id="DisplayArea">' + "\n".join(body) + "</div></body></html>"
    )


def switch(**choices: str) -> str:
    """Texts for platforms; `default` is the one where no other fits."""
    spans = "".join(
        f'<span hidden="true" id="{"default" if name == "default" else name}x_1"'
        + ("" if name == "default" else f' class="{name}"')
        + f">{text}</span>"
        for name, text in choices.items()
    )
    return f'<span id="swlnsys_1" class="switchinline">{spans}</span>'


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<p id="par_id1" class="paragraph">A  <b>bold</b>\nword &amp;</p>', [("par_id1", "A bold word &")]),
        ('<h2 id="hd_id2"><a name="x"></a><a href="y">Title</a></h2>', [("hd_id2", "Title")]),
        ('<p id="par_id3">one<br>two<img src="i">three</p>', [("par_id3", "one twothree")]),
        (f'<p id="par_id4">Press {switch(MAC="Command", default="Ctrl")}+C.</p>', [("par_id4", "Press Ctrl+C.")]),
        (f'<p id="par_id5">See {switch(WRITER="Text", CALC="Cells")} there.</p>', [("par_id5", "")]),
        (f'<p id="par_id6">{switch(MAC="A", default="B" + switch(WIN="C", default="D"))}</p>', [("par_id6", "BD")]),
        (f'<p id="par_id7">{switch(MAC="A" + switch(WIN="C"), default="B")}</p>', [("par_id7", "B")]),
        ('<p id="par_id8" class="code">Sub Main</p><pre id="par_id9">x</pre>', []),
        ('<div class="bascode"><p id="par_id8">Sub Main</p></div><p id="par_id9">t</p>', [("par_id9", "t")]),
        ('<span hidden="true" id="MACx"><p id="par_id1">Mac</p></span><p id="par_id2">all</p>', [("par_id2", "all")]),
        ('<p>no id</p><div id="par_id1">no paragraph</div><p id="par_id2"> </p>', [("par_id2", "")]),
        ('<p id="par_id1">open <span>never closed</p><p id="par_id2">next</p>', [
            ("par_id1", "open never closed"), ("par_id2", "next"),
        ]),
    ],
)  # fmt: skip
def test_the_paragraphs_of_a_page(body, found):
    assert list(paragraphs(page(body))) == found


def test_paragraphs_of_one_id_are_translations():
    english = page(
        '<p id="par_id1">One.</p>', '<p id="par_id2">Only English.</p>', '<p id="par_id3">LibreOffice  writer</p>',
        '<p id="par_id4">1.2</p>', '<p id="par_id5">Twice.</p>', '<p id="par_id5">Again.</p>',
        '<p id="par_id6">Twice.</p>', '<p id="par_id6">Here.</p>',
    )  # fmt: skip
    german = page(
        '<p id="par_id6">Zweimal.</p>', '<p id="par_id1">Eins.</p>', '<p id="par_id3">LibreOffice Writer</p>',
        '<p id="par_id4">1,2</p>', '<p id="par_id5">Doppelt.</p>', '<p id="par_id5">Noch einmal.</p>',
    )  # fmt: skip
    assert list(align(english, german)) == [("One.", "Eins."), ("Twice.", "Doppelt."), ("Again.", "Noch einmal.")]


def names(held_out: bool, count: int) -> list[str]:
    return [name for n in range(400) if is_held_out(name := f"swriter/01/{n:08}.html") == held_out][:count]


@pytest.fixture
def installed(tmp_path):
    """An installed help of twelve pages, four of them held out, that embed one another."""
    folder = tmp_path / "help"
    shared = [("par_id1", "Everywhere the same.", "Überall dasselbe.")]
    for index, name in enumerate(names(False, 8) + names(True, 4)):
        own = [("par_id2", f"English {index}.", f"Deutsch {index}."), ("par_id3", f"More {index}.", "Immer gleich.")]
        for language, side in (("en-US", 1), ("de", 2)):
            path = folder / language / "text" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page(*(f'<p id="{row[0]}">{row[side]}</p>' for row in shared + own)), encoding="utf-8")
    return folder


def test_an_installed_help_becomes_pairs_split_by_file(installed, data_dir):
    said: list[str] = []
    prepare("help_en_de", archives=installed, say=said.append)
    assert said[-1].startswith("done: 17 training, 4 held-out pairs in ")
    source = HelpPages("help_en_de")
    source.check()
    train, held_out = list(source.train()), list(source.held_out())
    # What training files say, in either language, is no test: neither the shared text nor "Immer gleich.".
    assert held_out == [(f"English {n}.", f"Deutsch {n}.") for n in range(8, 12)]
    assert len(set(train)) == len(train) == 17 and ("Everywhere the same.", "Überall dasselbe.") in train
    assert source.files("held_out") == set(names(True, 4)) and not source.files("train") & source.files("held_out")
    assert [path.name for path in data_dir.iterdir()] == ["help_en_de"]
    prepare("help_en_de", archives=None, say=said.append)
    assert said[-1].startswith("help_en_de is prepared already: 17 training")


def test_other_pages_are_another_set(installed, data_dir):
    prepare("help_en_de", archives=installed, say=str)
    first = HelpPages("help_en_de").digest()
    (help_pages.prepared_folder("help_en_de") / "facts.json").unlink()
    (help_pages.prepared_folder("help_en_de") / "pairs.jsonl").unlink()
    help_pages.prepared_folder("help_en_de").rmdir()
    path = installed / "de" / "text" / names(False, 1)[0]
    path.write_text(path.read_text().replace("Deutsch", "Deutsches"))
    prepare("help_en_de", archives=installed, say=str)
    assert HelpPages("help_en_de").digest() != first


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(data_dir):
    data = TextPairs(source=HelpPages("help_en_fr"), vocab_size=4000, max_length=64)  # a plan is printed without data
    with pytest.raises(UsageError, match=f"launcher.gin_configs.data help_en_fr --data_dir={data_dir}"):
        data.check()


@pytest.mark.parametrize("missing", ["de", "en-US"])
def test_archives_without_both_languages_are_refused(installed, data_dir, missing, capsys):
    (installed / missing / "text").rename(installed / missing / "pages")
    command = ["prepare", "help_en_de", f"--archives={installed}", f"--data_dir={data_dir}"]
    assert program.main(command, make=make) == EXIT_USAGE
    assert "must be the folder of LibreOffice's offline help, with en-US/text and de/text" in capsys.readouterr().err
    assert not data_dir.exists()


def test_pages_without_a_common_paragraph_leave_nothing_behind(installed, data_dir):
    for path in (installed / "de").rglob("*.html"):
        path.write_text(page('<p id="par_id99">Anderes.</p>'))
    with pytest.raises(UsageError, match="no paragraph in common"):
        prepare("help_en_de", archives=installed, say=str)
    assert not list(data_dir.rglob("*.partial"))


def test_the_real_help_is_prepared_as_it_should_be(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR")
    source = HelpPages("help_en_de")
    if not help_pages.prepared_folder("help_en_de").is_dir():
        pytest.skip(f"help_en_de is not prepared in {tfds.data_dir()}")
    train, held_out = list(source.train()), list(source.held_out())
    facts = json.loads((help_pages.prepared_folder("help_en_de") / "facts.json").read_text())
    assert (facts["train"], facts["held_out"]) == (len(train), len(held_out))
    assert len(train) > 25_000 and len(held_out) > 1_000
    assert not source.files("train") & source.files("held_out")
    for side in (0, 1):
        assert not {" ".join(pair[side].casefold().split()) for pair in train} & {
            " ".join(pair[side].casefold().split()) for pair in held_out
        }
    assert all(source and target and source != target for source, target in train + held_out)
