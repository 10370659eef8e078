"""Translation: teacher forcing in training, beam search and BLEU in evaluation."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_value, one_of
from launcher.data.pipeline import ArrayExamples, Batch, ExamplesEvaluation, Shard
from launcher.data.text.pairs import TextPairs
from launcher.data.text.vocabulary import BEGIN, END, PADDING, UNKNOWN
from launcher.decoding import beam_search, decode, without
from launcher.errors import UsageError
from launcher.machine import installation
from launcher.machine.no_autograph import no_autograph
from launcher.tasks.base import Score
from launcher.tasks.text import TextTask, rows_of

DECODE = ("always", "end", "never")
_SAMPLES = 10


@gin.configurable(name_or_fn="translation")
class Translation(TextTask):
    """Label-smoothed cross-entropy a target token; evaluation is unsmoothed, and translates held-out sources.

    The loss and `accuracy` are means over target tokens that are not padding, given the right tokens before them.
    `bleu` (Papineni et al. 2002, by sacrebleu, 0 to 100) and `exact_match` (share of translations that are the
    reference, letter by letter) are of translations that the model writes alone.

    Args:
      data: pairs of texts, `@text_pairs()`.
      model: builder called with `vocab_size`, a reference such as `@transformer`.
      label_smoothing: share of the target spread evenly over all tokens in training, in [0, 1).
      beam_size: texts that beam search writes side by side; 1 is greedy search.
      length_penalty: alpha of Wu et al. 2016; 0 takes the likeliest text.
      decode: which evaluations translate: "always", "end" (only the one after the last step, or of --mode=eval) or
        "never".
      decode_examples: how many held-out sources are translated, evenly spread; None for all.
    """

    def __init__(
        self,
        *,
        data: TextPairs = gin.REQUIRED,
        model: Callable[..., keras.Model] = gin.REQUIRED,
        label_smoothing: float = 0.1,
        beam_size: int = 4,
        length_penalty: float = 0.6,
        decode: str = "always",
        decode_examples: int | None = 500,
    ):
        super().__init__(data, model, label_smoothing, name="translation", example="@transformer")
        check_value("translation.beam_size", beam_size, beam_size >= 1, "1 or more")
        check_value("translation.length_penalty", length_penalty, length_penalty >= 0, "0 or more")
        check_value("translation.decode", decode, decode in DECODE, one_of(DECODE))
        if decode_examples is not None and decode_examples < 1:
            raise UsageError(f"translation.decode_examples = {decode_examples}: must be 1 or more, or None for all")
        self._beam_size = beam_size
        self._length_penalty = length_penalty
        self._decode = decode
        self._decode_examples = decode_examples
        # Rows of several pairs are nearly full, rows of one are perhaps half full.
        self.nominal_weight_per_example = data.row_length * (1.0 if data.packed else 0.5)
        self.evaluation_metrics = ("bleu", "exact_match") if decode == "always" else ()

    targets, size_binding = "target_out", "text_pairs.vocab_size"

    def check(self) -> None:
        """Raises UsageError where sacrebleu is missing and needed."""
        if self._decode != "never":
            _sacrebleu("translation.decode")

    def num_decode_examples(self, last: bool) -> int:
        if self._decode == "never" or (self._decode == "end" and not last):
            return 0
        return len(self._chosen)

    def decode_batches(self, shard: Shard) -> tf.data.Dataset:
        """Held-out sources, one a row, with "example", the place of each in `TextPairs.eval_pairs`."""
        sources = self.encode_lines([self._data.eval_pairs[example][0] for example in self._chosen])
        return ExamplesEvaluation(ArrayExamples({**sources, "example": self._chosen})).batches(shard, None)

    @no_autograph
    def generate(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """Translations int32 [b, max_length] of "source", each up to and with END, then 0."""
        sources = {"source": batch["source"]}
        rows, length = rows_of(batch["source"]), self._data.max_length
        # The first two are no text, and a vocabulary of bytes has nothing that is unknown.
        step = without(model.decode_step, (PADDING, BEGIN, UNKNOWN))
        cache = model.start_decoding(sources, rows * self._beam_size, length)
        if self._beam_size == 1:
            return decode(step, cache, tf.fill([rows, 1], BEGIN), max_length=length, end=END)
        ids, _ = beam_search(
            step,
            cache,
            rows=rows,
            begin=BEGIN,
            end=END,
            beams=self._beam_size,
            max_length=length,
            alpha=self._length_penalty,
        )
        return ids

    def score(self, examples: np.ndarray, outputs: np.ndarray) -> Score:
        sources, references = zip(*(self._data.eval_pairs[example] for example in examples), strict=True)
        translations = self.decode_lines(outputs)
        bleu = _sacrebleu("bleu").BLEU()
        value = float(bleu.corpus_score(list(translations), [list(references)]).score)
        exact = np.mean([made == wanted for made, wanted in zip(translations, references, strict=True)])
        how = "greedy" if self._beam_size == 1 else f"beam {self._beam_size}, length penalty {self._length_penalty:g}"
        notes = [f"{len(examples)} held-out translations ({how}): bleu is {bleu.get_signature()}"]
        shown = np.linspace(0, len(examples) - 1, min(_SAMPLES, len(examples))).astype(int)
        samples = [(sources[index], translations[index], references[index]) for index in shown]
        notes += [f"{source} -> {made} {'=' if made == wanted else '/'} {wanted}" for source, made, wanted in samples]
        return Score({"bleu": value, "exact_match": float(exact)}, notes, samples)

    def encoded(self, ids: tf.RaggedTensor) -> Batch:
        """Sources, cut to the longest that the model was trained on."""
        length = self._data.max_length
        ended = tf.concat([ids[:, : length - 1], tf.fill([ids.nrows(), 1], END)], axis=1)
        return {"source": ended.to_tensor(PADDING, shape=[None, length])}

    @functools.cached_property
    def _chosen(self) -> np.ndarray:
        """The held-out pairs to translate, int64 [n], ascending."""
        count = len(self._data.eval_pairs)
        wanted = count if self._decode_examples is None else min(count, self._decode_examples)
        return np.arange(wanted) * count // max(1, wanted)


def _sacrebleu(binding: str) -> types.ModuleType:
    """BLEU as papers report it (Post 2018, arXiv 1804.08771); raises UsageError where it is missing for a binding."""
    return installation.required("sacrebleu", by=binding, extra="text")
