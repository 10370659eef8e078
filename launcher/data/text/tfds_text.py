"""Prepared TFDS sets of translations, such as wmt14_translate/de-en, and of texts, such as lm1b."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from launcher.data import tfds
from launcher.data.text import storage
from launcher.errors import UsageError

Pair = tuple[str, str]

_READ_BATCH = 1024


class TfdsPairs:
    """Translations; see `launcher.data.text.source.Source`.

    Args:
      name: as TFDS writes it.
      source_language, target_language: as TFDS names them; by default the two of the set, in its own order.
      train_split, eval_split: as TFDS names them.
    """

    def __init__(
        self,
        name: str,
        *,
        source_language: str | None,
        target_language: str | None,
        train_split: str | None,
        eval_split: str | None,
    ):
        self.name = f"tfds:{name}"
        self._set = name
        self._wanted = (source_language, target_language)
        self._splits = (train_split or "train", eval_split or "test")

    def check(self) -> None:
        """Raises UsageError unless the set is prepared and holds these languages."""
        self._languages(_prepared(self._set, self._splits, "text_pairs"))

    def digest(self) -> str:
        builder = _prepared(self._set, self._splits, "text_pairs")
        return _digest(builder, self._splits, self._languages(builder))

    def train(self) -> Iterator[Pair]:
        return self._pairs(self._splits[0])

    def held_out(self) -> Iterator[Pair]:
        return self._pairs(self._splits[1])

    def _pairs(self, split: str) -> Iterator[Pair]:
        builder = _prepared(self._set, self._splits, "text_pairs")
        return ((source, target) for source, target in _read(builder, split, self._languages(builder)))

    def _languages(self, builder: Any) -> tuple[str, str]:
        features = builder.info.features
        if not isinstance(features, tfds.module().features.Translation):
            raise UsageError(f"text_pairs.name = {self.name!r} is no translation set; use text_corpus for plain text")
        known = list(features)
        first, second = builder.info.supervised_keys or known[:2]
        source, target = self._wanted
        source = source or (second if target == first else first)
        target = target or (first if source == second else second)
        if source not in known or target not in known or source == target:
            raise UsageError(
                f"text_pairs.source_language = {source!r} and target_language = {target!r} must be two of "
                f"{', '.join(known)}, which {self.name!r} has"
            )
        return source, target


class TfdsCorpus:
    """Texts, each a document; see `launcher.data.text.source.Source`.

    Args:
      name: as TFDS writes it.
      feature: that holds the text.
      train_split, eval_split: as TFDS names them.
    """

    def __init__(self, name: str, *, feature: str, train_split: str | None, eval_split: str | None):
        self.name = f"tfds:{name}"
        self._set = name
        self._feature = feature
        self._splits = (train_split or "train", eval_split or "test")

    def check(self) -> None:
        """Raises UsageError unless the set is prepared and has such a text."""
        builder = _prepared(self._set, self._splits, "text_corpus")
        module = tfds.module()
        features = builder.info.features
        known = [name for name in features if isinstance(features[name], module.features.Text)]
        if self._feature not in known:
            raise UsageError(
                f"text_corpus.text_feature = {self._feature!r}, but the texts of {self.name!r} are: "
                f"{', '.join(known) or 'none'}"
            )

    def digest(self) -> str:
        builder = _prepared(self._set, self._splits, "text_corpus")
        return _digest(builder, self._splits, [self._feature])

    def train(self) -> Iterator[str]:
        return self._texts(self._splits[0])

    def held_out(self) -> Iterator[str]:
        return self._texts(self._splits[1])

    def _texts(self, split: str) -> Iterator[str]:
        builder = _prepared(self._set, self._splits, "text_corpus")
        return (text for (text,) in _read(builder, split, [self._feature]))


def _prepared(name: str, splits: tuple[str, ...], binding: str) -> Any:
    builder = tfds.open_builder(name)
    tfds.check_prepared(builder, splits, binding=binding)
    return builder


def _digest(builder: Any, splits: Sequence[str], features: Sequence[str]) -> str:
    """Of the set's name and version and the sizes of its parts, in place of its content, which may be gigabytes."""
    sizes = [tfds.num_examples(builder, split) for split in splits]
    return storage.digest(builder.info.full_name, builder.info.dataset_size, *splits, *sizes, *features)


def _read(builder: Any, split: str, features: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The features of each example as text, in the order of the files."""
    examples = builder.as_dataset(split=split, read_config=tfds.read_config())
    batches = examples.map(lambda example: tuple(example[name] for name in features)).batch(_READ_BATCH).prefetch(1)
    for columns in batches.as_numpy_iterator():
        for values in zip(*columns, strict=True):
            yield tuple(value.decode("utf-8") for value in values)
