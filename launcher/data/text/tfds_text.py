"""Prepared TFDS sets of translations, such as wmt14_translate/de-en, and of texts, such as lm1b."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import gin

from launcher.data import tfds
from launcher.data.text import storage
from launcher.errors import UsageError

_READ_BATCH = 1024


@dataclasses.dataclass(eq=False)
class _TfdsTexts(abc.ABC):
    """Texts of a TFDS set; see `launcher.data.text.source.Source`.

    Args:
      name: as TFDS writes it.
      train_split, eval_split: as TFDS names them.
    """

    name: str
    train_split: str = "train"
    eval_split: str = "test"

    binding: ClassVar[str]

    def __post_init__(self) -> None:
        self._set, self.name = self.name, f"tfds:{self.name}"
        self._splits = (self.train_split, self.eval_split)

    @abc.abstractmethod
    def _features(self, builder: Any) -> Sequence[str]:
        """Names of the features that are read; raises UsageError where the set has them not."""

    def _prepared(self) -> Any:
        builder = tfds.open_builder(self._set)
        tfds.check_prepared(builder, self._splits, binding=self.binding)
        return builder

    def check(self) -> None:
        """Raises UsageError unless the set is prepared and has these features."""
        self._features(self._prepared())

    def digest(self) -> str:
        """A digest of the set's name, version and sizes, in place of its content, which may be gigabytes."""
        builder = self._prepared()
        sizes = [tfds.num_examples(builder, split) for split in self._splits]
        return storage.digest(
            builder.info.full_name, builder.info.dataset_size, *self._splits, *sizes, *self._features(builder)
        )

    def train(self) -> Iterator[Any]:
        return self._read(self._splits[0])

    def held_out(self) -> Iterator[Any]:
        return self._read(self._splits[1])

    def _read(self, split: str) -> Iterator[Any]:
        """The features of each example, one as a text, two as a pair, in the order of the files."""
        builder = self._prepared()
        features = self._features(builder)
        batches = tfds.examples(builder, split, features).batch(_READ_BATCH).prefetch(1)
        with tfds.damage_named(builder, split):
            for columns in batches.as_numpy_iterator():
                for values in zip(*columns, strict=True):
                    texts = tuple(value.decode("utf-8") for value in values)
                    yield texts if len(texts) > 1 else texts[0]


@gin.configurable("tfds_pairs")
@dataclasses.dataclass(eq=False)
class TfdsPairs(_TfdsTexts):
    """Translations of a TFDS set: `text_pairs.name = 'tfds:NAME'`.

    Args:
      source_language, target_language: as TFDS names them; by default the two of the set, in its own order.
    """

    source_language: str | None = None
    target_language: str | None = None

    binding = "tfds_pairs"

    def _features(self, builder: Any) -> tuple[str, str]:
        features = builder.info.features
        if not isinstance(features, tfds.module().features.Translation):
            raise UsageError(f"text_pairs.name = {self.name!r} is no translation set; use text_corpus for plain text")
        known = list(features)
        first, second = builder.info.supervised_keys or known[:2]
        source, target = self.source_language, self.target_language
        source = source or (second if target == first else first)
        target = target or (first if source == second else second)
        if source not in known or target not in known or source == target:
            raise UsageError(f"tfds_pairs: {source!r} and {target!r} must be two of {', '.join(known)}")
        return source, target


@gin.configurable("tfds_corpus")
@dataclasses.dataclass(eq=False)
class TfdsCorpus(_TfdsTexts):
    """Texts of a TFDS set, each a document: `text_corpus.name = 'tfds:NAME'`.

    Args:
      text_feature: that holds the text.
    """

    text_feature: str = "text"

    binding = "tfds_corpus"

    def _features(self, builder: Any) -> list[str]:
        features = builder.info.features
        known = [name for name in features if isinstance(features[name], tfds.module().features.Text)]
        if self.text_feature not in known:
            raise UsageError(
                f"tfds_corpus.text_feature = {self.text_feature!r}, but the texts of {self.name!r} are: "
                f"{', '.join(known) or 'none'}"
            )
        return [self.text_feature]
