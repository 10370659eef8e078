"""A `Vocabulary` as TensorFlow operations: the same ids and the same texts, with tables that a SavedModel holds.

tensorflow-text would do it, too, but has to be imported by whoever loads the model, and brings the whole of tensorflow
along. Byte-pair encoding is short: join the two neighbours whose joint piece has the highest score, the leftmost of
equals, until no two neighbours make a piece. It takes a table look-up for all pairs of a batch and one pass for each
piece that is joined.
"""

from typing import Any

import tensorflow as tf

from launcher.data.text.vocabulary import BEGIN, END, ESCAPE, PADDING, SPACE_MARK, Vocabulary


class GraphVocabulary(tf.Module):
    """Encodes and decodes whole batches in the graph."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(name="vocabulary")
        processor = vocabulary.processor
        size = self._size = processor.get_piece_size()
        by_byte = {processor.piece_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
        plain = {
            processor.id_to_piece(number): number
            for number in range(size)
            if number not in by_byte and not processor.is_control(number) and not processor.is_unknown(number)
        }
        joins = {
            plain[piece[:cut]] * size + plain[piece[cut:]]: number
            for piece, number in plain.items()
            for cut in range(1, len(piece))
            if piece[:cut] in plain and piece[cut:] in plain
        }
        self._characters = _table({piece: number for piece, number in plain.items() if len(piece) == 1}, tf.string)
        self._joins = _table(joins, tf.int64)
        self._scores = tf.constant([processor.get_score(number) for number in range(size)], tf.float32)
        self._bytes = tf.constant([*by_byte], tf.int64)
        written = by_byte | {number: piece.replace(SPACE_MARK, " ").encode() for piece, number in plain.items()}
        self._pieces = tf.constant([written.get(number, b"") for number in range(size)], tf.string)

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Token ids int32 [n, (tokens)] of texts, string [n], without begin and end."""
        texts = tf.strings.regex_replace(texts, ESCAPE, ESCAPE + "0")
        texts = tf.strings.regex_replace(texts, SPACE_MARK, ESCAPE + "1")
        texts = tf.strings.regex_replace(texts, " ", SPACE_MARK)
        texts = tf.where(texts == "", "", SPACE_MARK + texts)
        characters = tf.strings.unicode_split(texts, "UTF-8")
        symbols = characters.with_flat_values(self._ids(characters.flat_values)).to_tensor(-1)
        joined, _ = tf.while_loop(
            lambda _, more: more,
            lambda symbols, _: self._join(symbols),
            (_real(tf.reshape(symbols, tf.shape(symbols)[:2] * [1, 4])).to_tensor(-1), tf.constant(True)),
            shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([])),
            parallel_iterations=1,
        )
        return tf.cast(_real(joined), tf.int32)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Texts, string [n], of int32 [n, length]: each up to its first END, without padding and BEGIN."""
        ended = tf.cumsum(tf.cast(ids == END, tf.int32), axis=1) > 0
        is_text = ~ended & (ids != PADDING) & (ids != BEGIN)
        texts = tf.strings.reduce_join(tf.where(is_text, tf.gather(self._pieces, ids), ""), axis=1)
        texts = tf.strings.regex_replace(texts, "^ ", "")
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        texts = tf.strings.regex_replace(texts, ESCAPE + "1", SPACE_MARK)
        return tf.strings.regex_replace(texts, ESCAPE + "0", ESCAPE)

    def _join(self, symbols: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """One join in every row that has one; whether any row had."""
        right = tf.pad(symbols[:, 1:], [[0, 0], [0, 1]], constant_values=-1)
        both = (symbols >= 0) & (right >= 0)
        joint = self._joins.lookup(tf.where(both, symbols * self._size + right, -1))
        scores = tf.where(joint >= 0, tf.gather(self._scores, tf.maximum(joint, 0)), tf.float32.min)
        # Without a single character there is nothing to take the largest of.
        padded = tf.pad(scores, [[0, 0], [0, 1]], constant_values=tf.float32.min)
        place = tf.argmax(padded, axis=1)[:, None]
        has_join = tf.reduce_any(joint >= 0, axis=1, keepdims=True)
        numbers = tf.range(tf.shape(symbols, tf.int64)[1])[None]
        changed = tf.where(numbers == place, joint, tf.where(numbers > place, right, symbols))
        return tf.where(has_join, changed, symbols), tf.reduce_any(has_join)

    def _ids(self, characters: tf.Tensor) -> tf.Tensor:
        """Characters, string [n], as ids [n, 4]: a piece, or the bytes of what is none; -1 for the rest."""
        known = self._characters.lookup(characters)[:, None]
        codes = tf.cast(tf.io.decode_raw(characters, tf.uint8, fixed_length=4), tf.int32)
        is_byte = tf.range(4) < tf.strings.length(characters)[:, None]
        spelled = tf.where(is_byte, tf.gather(self._bytes, codes), -1)
        return tf.where(known >= 0, tf.pad(known, [[0, 0], [0, 3]], constant_values=-1), spelled)


def _real(ids: tf.Tensor) -> tf.RaggedTensor:
    return tf.ragged.boolean_mask(ids, ids >= 0)


def _table(entries: dict[Any, int], kind: tf.DType) -> tf.lookup.StaticHashTable:
    keys, values = tf.constant(list(entries), kind), tf.constant(list(entries.values()), tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default_value=-1)
