"""Decoding: the tokens that a model writes, one after another, in `tf.while_loop`s of static shapes.

A model that can be decoded has two methods, as those of `models.transformer` and `models.lstm`:

    cache = model.start_decoding(batch, rows, max_length)           a nest of tensors with the first axis `rows`
    logits, cache = model.decode_step(tokens, index, cache)         int32 [rows], int32 [] -> float32 [rows, vocabulary]
"""

from launcher.decoding.beam import beam_search
from launcher.decoding.sampling import Step, decode, drawn, likeliest, without

__all__ = ["Step", "beam_search", "decode", "drawn", "likeliest", "without"]
