"""Numbers, ordinals, dates and amounts in English words, to be said in German: made by num2words and babel.

    import launcher.gin_configs.data.spoken_numbers
    text_pairs.source = @SpokenNumbers()

    twenty-seven thousand and one                 siebenundzwanzigtausendeins
    the fifth of March nineteen ninety-nine       der fünfte März neunzehnhundertneunundneunzig
    four hundred and twelve euros and five cents  vierhundertzwölf Euro und fünf Cent

English to German, because every English phrase here has exactly one German one, so that a translation is right or
wrong, and because German turns round units and tens, joins words and inflects: nothing can be copied word by word.

Whole ranges are held out: no number in `HELD_OUT_NUMBERS` and no year in `HELD_OUT_YEARS` is trained on.
"""

from __future__ import annotations

import bisect
import datetime
import functools
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import gin

from launcher.data.text import storage
from launcher.errors import UsageError
from launcher.machine import installation

HELD_OUT_NUMBERS = (
    range(1_300, 1_400),
    range(4_700, 4_800),
    range(8_250, 8_350),
    range(27_000, 28_000),
    range(61_000, 63_000),
    range(150_000, 160_000),
    range(480_000, 500_000),
    range(731_000, 760_000),
)
HELD_OUT_YEARS = (range(1_840, 1_850), range(1_911, 1_915), range(1_973, 1_977), range(2_031, 2_034))

_FORMAT = 1
_LIMIT = 1_000_000
_YEARS = range(1_700, 2_100)

_SMALL = 10_000  # below, every number is a cardinal of one set or the other

# (small ones, larger ones) of each kind; of dates, all are one.
_TRAIN = {"cardinal": (_SMALL, 16_000), "ordinal": (4_000, 8_000), "amount": (3_000, 7_000), "date": (0, 12_000)}
_HELD_OUT = {"cardinal": (_SMALL, 700), "ordinal": (100, 400), "amount": (100, 400), "date": (0, 600)}

_CURRENCIES = ("EUR", "USD", "CHF")
_CENTS = {"EUR": ("cents", "Cent"), "USD": ("cents", "Cent"), "CHF": ("rappen", "Rappen")}

# A prime: walking through a list by this step, in a circle, meets everything once, evenly and the same every time.
_STRIDE = 611_953

Pair = tuple[str, str]
T = TypeVar("T")


@gin.configurable
class SpokenNumbers:
    """The pairs; see `launcher.data.text.source.Source`."""

    name = "spoken_numbers"

    def check(self) -> None:
        """Raises UsageError where num2words or babel is missing."""
        for package in ("num2words", "babel"):
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                if error.name != package:
                    raise
                raise UsageError(
                    f"text_pairs.source = @SpokenNumbers() needs {package}, which is not installed: "
                    f"{installation.command('text')}"
                ) from None

    def digest(self) -> str:
        self.check()
        versions = [importlib.metadata.version(package) for package in ("num2words", "babel")]
        return storage.digest(_FORMAT, *versions, _TRAIN, _HELD_OUT, HELD_OUT_NUMBERS, HELD_OUT_YEARS)

    def train(self) -> Iterator[Pair]:
        """60,000 pairs or so, no source twice."""
        self.check()
        return iter(self._train)

    def held_out(self) -> Iterator[Pair]:
        """About 2,600 pairs from the held-out ranges."""
        self.check()
        return _pairs(_HELD_OUT, held_out=True)

    @functools.cached_property
    def _train(self) -> list[Pair]:
        """Kept: making them takes seconds, and the vocabulary asks for them, too."""
        return list(_pairs(_TRAIN, held_out=False))


def is_held_out(number: int) -> bool:
    """Whether no training pair has this number, as a cardinal, an ordinal or the whole part of an amount."""
    return any(number in held_out for held_out in HELD_OUT_NUMBERS)


def _pairs(counts: Mapping[str, tuple[int, int]], *, held_out: bool) -> Iterator[Pair]:
    for kind, say in (("cardinal", _cardinal), ("ordinal", _ordinal), ("amount", _amount)):
        for number in _numbers(*counts[kind], held_out=held_out):
            yield from say(number)
    for day in _spread(_days(held_out=held_out), counts["date"][1]):
        yield _date(day)


def _numbers(small: int, large: int, *, held_out: bool) -> list[int]:
    """So many numbers below `_SMALL`, and so many above."""
    marks = bytearray(_LIMIT)
    for part in HELD_OUT_NUMBERS:
        marks[part.start : part.stop] = bytes([1]) * len(part)
    numbers = [number for number, mark in enumerate(marks) if mark == held_out]
    first_large = bisect.bisect_left(numbers, _SMALL)
    return _spread(numbers[:first_large], small) + _spread(numbers[first_large:], large)


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, or all there are, none twice."""
    return [items[index * _STRIDE % len(items)] for index in range(min(count, len(items)))]


def _days(*, held_out: bool) -> list[datetime.date]:
    first, last = datetime.date(_YEARS.start, 1, 1), datetime.date(_YEARS.stop, 1, 1)
    days = map(datetime.date.fromordinal, range(first.toordinal(), last.toordinal()))
    return [day for day in days if any(day.year in part for part in HELD_OUT_YEARS) == held_out]


def _cardinal(number: int) -> Iterator[Pair]:
    yield _words("en", number), _words("de", number)


def _ordinal(number: int) -> Iterator[Pair]:
    if number:
        yield _words("en", number, "ordinal"), _words("de", number, "ordinal")


def _amount(number: int) -> Iterator[Pair]:
    """Where the last two digits are 01, German needs to know the gender of the currency: there is none of those."""
    from babel.numbers import get_currency_name

    if number % 100 == 1:
        return
    currency = _CURRENCIES[number % len(_CURRENCIES)]
    english, german = (
        f"{_words(language, number)} {get_currency_name(currency, number, language)}" for language in ("en", "de")
    )
    cents = number * 37 % 149
    if 1 < cents < 100:
        english += f" and {_words('en', cents)} {_CENTS[currency][0]}"
        german += f" und {_words('de', cents)} {_CENTS[currency][1]}"
    yield english, german


def _date(day: datetime.date) -> Pair:
    from babel.dates import format_date

    (english_month, german_month), (english_weekday, german_weekday) = (
        [format_date(day, part, language) for language in ("en", "de")] for part in ("MMMM", "EEEE")
    )
    english = f"the {_words('en', day.day, 'ordinal')} of {english_month} {_words('en', day.year, 'year')}"
    german = f"der {_words('de', day.day, 'ordinal')} {german_month} {_words('de', day.year, 'year')}"
    if day.toordinal() % 3:
        return english, german
    return f"{english_weekday}, {english}", f"{german_weekday}, {german}"


@functools.lru_cache(maxsize=4096)
def _words(language: str, number: int, kind: str = "cardinal") -> str:
    from num2words import num2words

    return num2words(number, lang=language, to=kind)
