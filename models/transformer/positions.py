"""Places of tokens, and what they see: sinusoids, rotations, segments of packed rows and masks."""

import dataclasses

import tensorflow as tf

from .layers import sizes


def layout(tokens: tf.Tensor, segments: tf.Tensor | None, positions: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Segments and positions of the tokens, integers [batch, length].

    Where they are not given, a row is one segment of its tokens that are not 0 (padding), counted from 0.
    """
    if segments is None:
        segments = tf.cast(tokens != 0, tf.int32)
    if positions is None:
        positions = tf.broadcast_to(tf.range(sizes(tokens)[1])[None], sizes(tokens))
    return segments, positions


def sinusoids(positions: tf.Tensor, width: int) -> tf.Tensor:
    """The positional encoding of Vaswani et al. 2017 (arXiv 1706.03762, section 3.5), float32 [..., width], width even.

    Element 2i is sin(position / 10,000 ** (2i / width)), element 2i + 1 the cosine of the same angle.
    """
    angles = _angles(positions, width)
    return tf.reshape(tf.stack([tf.sin(angles), tf.cos(angles)], axis=-1), [*sizes(positions), width])


def rotate(vectors: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864): the product of two vectors sees their distance.

    The plane i is spanned by the elements i and i + width / 2, as in GPT-NeoX and Llama (the paper takes neighbours,
    which is the same up to an order of the elements), and turns by position / 10,000 ** (2i / width).

    Args:
        vectors: Queries or keys [batch, length, heads, width], width even.
        positions: Integers [batch, length].

    Returns:
        Shape and dtype of `vectors`. The rotation is computed in float32.
    """
    angles = _angles(positions, vectors.shape[-1])[:, :, None, :]
    cosines, sines = tf.cos(angles), tf.sin(angles)
    first, second = tf.split(tf.cast(vectors, tf.float32), 2, axis=-1)
    rotated = tf.concat([first * cosines - second * sines, first * sines + second * cosines], axis=-1)
    return tf.cast(rotated, vectors.dtype)


def _angles(positions: tf.Tensor, width: int) -> tf.Tensor:
    # Frequencies as constants of the graph, computed in Python: float32 powers would cost digits at far positions.
    frequencies = tf.constant([10_000.0 ** (-2.0 * plane / width) for plane in range(width // 2)], tf.float32)
    return tf.cast(positions, tf.float32)[..., None] * frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """Keys that a query may look at: those of its own segment and, where it is causal, none that stands later.

    Nothing of the size queries x keys is held: attention in blocks makes it block by block. It is no tuple, since
    Keras refuses nested arguments in which tensors and other values are mixed.
    """

    query_segments: tf.Tensor  # integers [batch, queries]; 0 is padding, which sees and shows nothing
    key_segments: tf.Tensor  # integers [batch, keys]
    causal: bool = False  # a query sees no key that stands later in the row; both lengths are equal then

    def allowed(self) -> tf.Tensor:
        """The mask, bool [batch, queries, keys]: where a query may look."""
        allowed = same_segment(self.query_segments, self.key_segments)
        return allowed & no_later(sizes(self.key_segments)[1]) if self.causal else allowed

    def sees(self) -> tf.Tensor:
        """bool [batch, queries]: whether a query may look anywhere."""
        if self.query_segments is self.key_segments:
            return self.query_segments != 0  # at least at itself
        return tf.reduce_any(self.allowed(), axis=-1)


def same_segment(query_segments: tf.Tensor, key_segments: tf.Tensor) -> tf.Tensor:
    """bool [..., queries, keys]: whether both belong to one segment; segment 0 is padding and belongs to nothing."""
    query_segments, key_segments = query_segments[..., :, None], key_segments[..., None, :]
    return (query_segments == key_segments) & (key_segments != 0)


def no_later(length: int | tf.Tensor) -> tf.Tensor:
    """bool [1, length, length]: whether the key stands no later in the row than the query (a causal mask)."""
    places = tf.range(length)
    return (places[:, None] >= places[None, :])[None]
