"""Language modelling: the next token of running text, in perplexity and bits per byte; continuations by sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.data.text.corpus import TextCorpus
from launcher.data.text.graph_vocabulary import GraphVocabulary
from launcher.data.text.vocabulary import BEGIN, END, PADDING, UNKNOWN
from launcher.decoding import decode, drawn, likeliest, without
from launcher.machine.no_autograph import no_autograph
from launcher.tasks.base import Served, check_builder
from launcher.tasks.text import Sums, TextTask, model_sums, padded, rows_of


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
        check_builder("language_modelling.model", model, "@language_model")
        check_value("language_modelling.label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)")
        most = data.length - 1
        check_value("language_modelling.max_new_tokens", max_new_tokens, 1 <= max_new_tokens <= most, f"1 to {most}")
        check_value("language_modelling.temperature", temperature, 0 <= temperature < math.inf, "0 or more")
        check_value("language_modelling.top_p", top_p, 0 < top_p <= 1, "in (0, 1]")
        super().__init__(data, model, "text_corpus.vocab_size")
        self._label_smoothing = label_smoothing
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature
        self._top_p = top_p
        self._sampling_seed = sampling_seed
        self.nominal_weight_per_example = float(data.length)
        self.logits_shape = (data.length, data.vocab_size)
        self.evaluation_metrics = ("bits_per_byte", "perplexity")

    @no_autograph
    def loss(self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool) -> Sums:
        loss, weight, metrics = model_sums(
            model,
            batch,
            batch["targets"],
            training=training,
            label_smoothing=self._label_smoothing if training else 0.0,
        )
        if not training:
            # Bits a byte are a mean over bytes. The mean is taken over tokens, each of which has so many of them.
            metrics["bits_per_byte"] = loss / (math.log(2) * self._data.bytes_per_token)
        return loss, weight, metrics

    def finish_metrics(self, means: dict[str, float]) -> dict[str, float]:
        # A model that is lost may be so by more than a float holds.
        return {**means, "perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}

    @no_autograph
    def generate(self, model: keras.Model, batch: dict[str, tf.Tensor]) -> tf.Tensor:
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

    def served(self, model: keras.Model) -> Served:
        """Texts in, the same texts and how they go on out; all draws are those of one seed."""
        vocabulary, room = GraphVocabulary(self.vocabulary), self._data.length - self._max_new_tokens

        @no_autograph
        def serve(text: tf.Tensor) -> dict[str, tf.Tensor]:
            begun = tf.concat([tf.fill([tf.size(text), 1], BEGIN), vocabulary.encode(text)], axis=1)
            prompt = begun[:, -room:].to_tensor(PADDING, shape=[None, room])
            return {"text": vocabulary.decode(self.generate(model, {"prompt": prompt}))}

        return Served("text", serve, [vocabulary])

    def encode_lines(self, lines: Sequence[str]) -> dict[str, np.ndarray]:
        """Prompts; of a long line only the end, so that the row the model was trained on has room to go on."""
        room = self._data.length - self._max_new_tokens
        tokens = [[BEGIN, *line][-room:] for line in self.vocabulary.encode(lines)]
        # Few lengths make few programs.
        length = min(room, 1 << (max(map(len, tokens), default=1) - 1).bit_length())
        return {"prompt": padded(tokens, max(length, 1))}
