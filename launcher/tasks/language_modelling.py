"""Language modelling: the next token of running text, in perplexity and bits per byte; continuations by sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.data.pipeline import Batch
from launcher.data.text.corpus import TextCorpus
from launcher.data.text.vocabulary import BEGIN, END, PADDING, UNKNOWN
from launcher.decoding import decode, drawn, likeliest, without
from launcher.machine.no_autograph import no_autograph
from launcher.tasks.base import Sums
from launcher.tasks.text import TextTask, rows_of


@gin.configurable(name_or_fn="language_modelling")
class LanguageModelling(TextTask):
    """Cross-entropy a token of packed text, in nats.

    Metrics are `accuracy` and, in evaluation, `perplexity`, exp(loss), and `bits_per_byte`: what the model needs to
    encode the held-out text, ends of documents included, divided by its UTF-8 bytes. Unlike the others it can be
    compared between vocabularies.

    Args:
      data: running text, `@text_corpus()`.
      model: builder called with `vocab_size`, a reference such as `@language_model`.
      label_smoothing: share of the target spread evenly over all tokens in training, in [0, 1).
      max_new_tokens: most tokens that --mode=predict writes after a line; fewer than `text_corpus.length`.
      temperature: of sampling; 0 for the likeliest token each time.
      top_p: the share of probability that sampling keeps to, in (0, 1].
      sampling_seed: what --mode=predict draws depends on it, the lines, the weights and the number of replicas, each of
        which draws for its rows as one alone would.
    """

    def __init__(
        self,
        *,
        data: TextCorpus = gin.REQUIRED,
        model: Callable[..., keras.Model] = gin.REQUIRED,
        label_smoothing: float = 0.0,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_p: float = 0.95,
        sampling_seed: int = 0,
    ):
        super().__init__(data, model, label_smoothing, name="language_modelling", example="@language_model")
        most = data.length - 1
        check_value("language_modelling.max_new_tokens", max_new_tokens, 1 <= max_new_tokens <= most, f"1 to {most}")
        check_value("language_modelling.temperature", temperature, 0 <= temperature < math.inf, "0 or more")
        check_value("language_modelling.top_p", top_p, 0 < top_p <= 1, "in (0, 1]")
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._sampling_seed = sampling_seed
        self.nominal_weight_per_example = float(data.length)
        self.evaluation_metrics = ("bits_per_byte", "perplexity")

    targets, size_binding = "targets", "text_corpus.vocab_size"

    @no_autograph
    def loss(self, model: keras.Model, batch: Batch, training: bool) -> Sums:
        loss, weight, metrics = super().loss(model, batch, training)
        if not training:
            # Bits a byte are a mean over bytes. The mean is taken over tokens, each of which has so many of them.
            metrics["bits_per_byte"] = loss / (math.log(2) * self._data.bytes_per_token)
        return loss, weight, metrics

    def finish_metrics(self, means: dict[str, float]) -> dict[str, float]:
        # A model that is lost may be so by more than a float holds.
        return {**means, "perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}

    @no_autograph
    def generate(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """The rest of "prompt" [b, length] and how it goes on: int32 [b, static length], 0 after END."""
        prompt = batch["prompt"]
        steps = prompt.shape[1] - 1 + self._max_new_tokens
        step = without(model.decode_step, (PADDING, BEGIN, UNKNOWN))
        cache = model.start_decoding(None, rows_of(prompt), steps)
        given = tf.reduce_sum(tf.cast(prompt != PADDING, tf.int32), axis=1) - 1
        seed, settings = [self._sampling_seed & 0x7FFFFFFF, 0], {"temperature": self._temperature, "top_p": self._top_p}
        choose = drawn(tf.constant(seed), **settings) if self._temperature else likeliest
        lengths = given + self._max_new_tokens
        return decode(step, cache, prompt, max_length=steps, end=END, lengths=lengths, choose=choose)

    def encoded(self, ids: tf.RaggedTensor) -> Batch:
        """Prompts; of a long line only the end, so that the row the model was trained on has room to go on."""
        room = self._data.length - self._max_new_tokens
        begun = tf.concat([tf.fill([ids.nrows(), 1], BEGIN), ids], axis=1)
        return {"prompt": begun[:, -room:].to_tensor(PADDING, shape=[None, room])}

    def encode_lines(self, lines: Sequence[str]) -> dict[str, np.ndarray]:
        prompts = super().encode_lines(lines)["prompt"]
        # Few lengths make few programs.
        longest = int(np.count_nonzero(prompts, axis=1).max(initial=1))
        return {"prompt": prompts[:, : 1 << (longest - 1).bit_length()]}
