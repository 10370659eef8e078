from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from listed import pairs
from sources import made

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

TRAIN, TEST = pairs(120), pairs(20, start=300)


@pytest.fixture(scope="module")
def builders():
    """Real TFDS builders of translations and of texts."""
    import tensorflow_datasets as tfds

    class LauncherTestTranslations(tfds.core.GeneratorBasedBuilder):
        """German and English, as the sets of WMT have them."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.Translation(languages=("de", "en"))
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("de", "en"))

        def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
            return {"train": self._generate_examples(TRAIN), "test": self._generate_examples(TEST)}

        def _generate_examples(self, examples: list) -> Iterator:
            for index, (english, german) in enumerate(examples):
                yield index, {"en": english, "de": german}

    class LauncherTestTexts(tfds.core.GeneratorBasedBuilder):
        """Texts with a title, and a number."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict(
                {"text": text, "title": text, "stars": tfds.features.Scalar(np.int32)}
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
            return {"train": self._generate_examples(TRAIN), "test": self._generate_examples(TEST)}

        def _generate_examples(self, examples: list) -> Iterator:
            for index, (english, german) in enumerate(examples):
                yield index, {"text": german, "title": english, "stars": index}

    return ["launcher_test_translations", "launcher_test_texts"]


@pytest.fixture(scope="module")
def prepared_dir(builders, tmp_path_factory):
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    for name in builders:
        tfds.builder(name, data_dir=folder).download_and_prepare(
            download_config=tfds.download.DownloadConfig(num_shards=3, try_download_gcs=False)
        )
    return folder


@pytest.fixture
def prepared(prepared_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared_dir))


def translations(**options):
    settings = {"name": "tfds:launcher_test_translations", "vocab_size": 310, "max_length": 40}
    return made(TextPairs, **(settings | options))


def texts(**options):
    return made(TextCorpus, **{"name": "tfds:launcher_test_texts", "vocab_size": 290, "length": 24, **options})


@pytest.mark.parametrize(
    ("languages", "turned"), [({}, True), ({"source_language": "en"}, False), ({"target_language": "de"}, False)]
)
def test_translations_go_from_the_language_asked_for(prepared, languages, turned):
    data = translations(**languages)
    data.check()
    wanted = [tuple(reversed(pair)) if turned else pair for pair in TEST]
    assert sorted(data.eval_pairs) == sorted(wanted)
    train = list(data.source.train())
    assert len(train) == len(TRAIN) and train == list(data.source.train())  # in one order, every time
    assert data.num_train_examples > 0 and data.num_eval_examples > 0


def test_parts_of_splits_can_be_named(prepared):
    data = translations(train_split="train[:50%]", eval_split="train[50%:]")
    data.check()
    train = list(data.source.train())
    assert not {pair[0] for pair in train} & {pair[0] for pair in data.eval_pairs}
    assert len(train) + len(data.eval_pairs) == len(TRAIN)


def test_texts_come_from_the_feature_asked_for(prepared):
    data = texts(text_feature="title")
    data.check()
    assert sorted(data.source.held_out()) == sorted(english for english, _ in TEST)
    other = texts()
    other.check()
    assert other.bytes_per_token != data.bytes_per_token and other.num_train_examples > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: translations(source_language="fr"), "must be two of de, en"),
        (lambda: translations(source_language="de", target_language="de"), "must be two of de, en"),
        (lambda: translations(eval_split="dev"), "bind tfds_pairs.train_split and tfds_pairs.eval_split"),
        (lambda: translations(name="tfds:launcher_test_texts"), "is no translation set; use text_corpus"),
        (lambda: texts(text_feature="stars"), "the texts of 'tfds:launcher_test_texts' are: text, title"),
        (lambda: texts(name="tfds:launcher_test_text"), "did you mean 'launcher_test_texts'"),
    ],
)
def test_what_does_not_fit_is_found_by_the_check(prepared, make, words):
    data = make()
    with pytest.raises(UsageError) as caught:
        data.check()
    assert words in str(caught.value)


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(builders, data_dir):
    data = translations()
    with pytest.raises(UsageError, match=r"is not prepared.*launcher\.data\.prepare launcher_test_translations"):
        data.check()
    assert not data_dir.exists()
