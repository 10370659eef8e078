from __future__ import annotations

import datetime
import re
import sys

import pytest
from num2words import num2words

from launcher.errors import UsageError
from launcher.gin_configs.data import spoken_numbers
from launcher.gin_configs.data.spoken_numbers import HELD_OUT_NUMBERS, HELD_OUT_YEARS, SpokenNumbers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def few():
    """Fewer training pairs, made in the same way."""
    counts = {"cardinal": (900, 500), "ordinal": (200, 300), "amount": (200, 300), "date": (0, 500)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spoken_numbers, "_TRAIN", counts)
        return list(SpokenNumbers().train())


@pytest.fixture(scope="module")
def held_out():
    return list(SpokenNumbers().held_out())


def test_every_english_phrase_has_one_german_one(few, held_out):
    assert len({source for source, _ in few + held_out}) == len(few) + len(held_out)
    assert 2_500 <= len(held_out) <= 2_700


def test_no_phrase_with_a_held_out_number_or_year_is_trained_on(few, held_out):
    numbers = [number for part in HELD_OUT_NUMBERS for number in part]
    forbidden = {
        num2words(number, lang=language, to=kind)
        for number in (*numbers[::97], *numbers[:40])
        for language in ("en", "de")
        for kind in ("cardinal", "ordinal")
    }
    for text in (text for pair in few for text in pair):
        # The number of an amount is what stands before its currency.
        assert re.split(r" (?:Euro|euros|US|Swiss|Schweizer)", text)[0] not in forbidden
    years = [year for part in HELD_OUT_YEARS for year in part]
    english, german = (
        tuple(f" {num2words(year, to='year', lang=language)}" for year in years) for language in ("en", "de")
    )
    assert not any(source.endswith(english) or target.endswith(german) for source, target in few)
    assert sum(source.endswith(english) and target.endswith(german) for source, target in held_out) >= 500


def test_held_out_and_training_numbers_share_nothing_in_the_whole_set():
    # The numbers behind all pairs, without the seconds that saying them takes.
    for held_out, counts in ((False, spoken_numbers._TRAIN), (True, spoken_numbers._HELD_OUT)):
        for kind in ("cardinal", "ordinal", "amount"):
            chosen = spoken_numbers._numbers(*counts[kind], held_out=held_out)
            assert len(set(chosen)) == len(chosen)
            assert {spoken_numbers.is_held_out(number) for number in chosen} == {held_out}
            if held_out:
                for part in HELD_OUT_NUMBERS:
                    assert sum(number in part for number in chosen) >= 4, (kind, part)
        years = {day.year for day in spoken_numbers._days(held_out=held_out)}
        assert {any(year in part for part in HELD_OUT_YEARS) for year in years} == {held_out}
        assert len(years) == (21 if held_out else 379)


def test_the_phrases_are_what_people_say(few, held_out):
    assert list(spoken_numbers._cardinal(21)) == [("twenty-one", "einundzwanzig")]
    assert list(spoken_numbers._ordinal(1001)) == [("one thousand and first", "eintausenderste")]
    assert list(spoken_numbers._amount(412)) == [
        (
            "four hundred and twelve US dollars and forty-six cents",
            "vierhundertzwölf US-Dollar und sechsundvierzig Cent",
        )
    ]
    assert list(spoken_numbers._amount(101)) == []
    assert spoken_numbers._date(datetime.date(1999, 3, 5)) == (
        "the fifth of March nineteen ninety-nine", "der fünfte März neunzehnhundertneunundneunzig",
    )  # fmt: skip
    known = dict(few + held_out)
    dates = [pair for pair in known.items() if " of " in pair[0]]
    assert all(" der " in f" {target}" for _, target in dates)
    assert any(source.startswith("Friday, the ") and target.startswith("Freitag, der ") for source, target in dates)
    amounts = [pair for pair in known.items() if " euros" in pair[0]]
    assert amounts and all(" Euro" in target for _, target in amounts)
    assert any(" cents" in source and target.endswith(" Cent") for source, target in amounts)


def test_the_pairs_are_the_same_every_time(held_out):
    assert list(SpokenNumbers().held_out()) == held_out
    assert SpokenNumbers().digest() == SpokenNumbers().digest()


@pytest.mark.parametrize("package", ["num2words", "babel"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"needs {package}.*pip install .*\[text\]"):
        SpokenNumbers().check()


def test_the_whole_set_has_a_stated_size(monkeypatch):
    # Numbers in digits: saying them takes ten seconds.
    monkeypatch.setattr(spoken_numbers, "_words", lambda language, number, kind="cardinal": f"{kind} {number}")
    train = list(SpokenNumbers().train())
    assert 55_000 <= len({source for source, _ in train}) == len(train) <= 62_000


@pytest.mark.heavy
@pytest.mark.nightly  # of the whole set what is asserted above of its numbers and of some of its phrases
def test_no_phrase_of_the_whole_set_comes_twice(held_out):
    train = list(SpokenNumbers().train())
    assert 55_000 <= len(train) <= 62_000
    sources = {source for source, _ in train}
    assert len(sources) == len(train)
    assert not sources & {source for source, _ in held_out}
    assert not {target for _, target in train} & {target for _, target in held_out}
