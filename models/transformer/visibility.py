"""Which positions see which: by segments of packed rows, and by their order."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from models.transformer.layers import sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which keys a query may look at: those of its own segment and, where it is causal, none that stands later.

    Nothing of the size queries x keys is held: attention in blocks makes it block by block. It is no tuple, since
    Keras refuses nested arguments in which tensors and other values are mixed.

    Attributes:
        query_segments: Integers [batch, queries]; 0 is padding, which sees and shows nothing.
        key_segments: Integers [batch, keys].
        causal: Whether a query sees no key that stands later in the row. Both lengths are equal then.
    """

    query_segments: tf.Tensor
    key_segments: tf.Tensor
    causal: bool = False

    def allowed(self) -> tf.Tensor:
        """The same as bool [batch, queries, keys]: where a query may look."""
        allowed = same_segment(self.query_segments, self.key_segments)
        return allowed & no_later(sizes(self.key_segments)[1]) if self.causal else allowed


def same_segment(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """bool [..., queries, keys]: whether both belong to one segment; segment 0 is padding and belongs to nothing."""
    query_segments, key_segments = query_segments[..., :, None], key_segments[..., None, :]
    return (query_segments == key_segments) & (key_segments != 0)


def no_later(length: int | tf.Tensor) -> tf.Tensor:
    """bool [1, length, length]: whether the key stands no later in the row than the query (a causal mask)."""
    places = tf.range(length)
    return (places[:, None] >= places[None, :])[None]
