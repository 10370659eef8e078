"""A `Vocabulary` as TensorFlow operations: the same ids and the same texts, with tables that a SavedModel holds.

tensorflow-text would do it, too, but has to be imported by whoever loads the model, and brings the whole of tensorflow
along. Byte-pair encoding is short: join the two neighbours whose joint piece has the highest score, the leftmost of
equals, until no two neighbours make a piece. It takes a table look-up for all pairs of a batch and one pass for each
piece that is joined.
"""

import tensorflow as tf

from launcher.data.text.vocabulary import BEGIN, END, PADDING, Vocabulary

# Sentencepiece writes a space as the first. The second escapes what the text has of it; see `Vocabulary`.
_SPACE_MARK, _ESCAPE = "\u2581", "\x1a"

# A character that is no piece goes as its code point above all ids, and ends as its UTF-8 bytes.
_CODE_POINTS = 0x110000


class GraphVocabulary(tf.Module):
    """Encodes and decodes whole batches in the graph."""

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(name="vocabulary")
        processor = vocabulary.processor
        size = self._size = processor.get_piece_size()
        self._stride = size + _CODE_POINTS
        pieces = [processor.id_to_piece(number) for number in range(size)]
        special = [processor.is_control(number) or processor.is_unknown(number) for number in range(size)]
        is_byte = [processor.is_byte(number) for number in range(size)]
        plain = {piece: number for number, piece in enumerate(pieces) if not special[number] and not is_byte[number]}
        joins = {
            plain[piece[:cut]] * self._stride + plain[piece[cut:]]: number
            for piece, number in plain.items()
            for cut in range(1, len(piece))
            if piece[:cut] in plain and piece[cut:] in plain
        }
        characters = {ord(piece): number for piece, number in plain.items() if len(piece) == 1}
        self._characters = _table(characters)
        self._joins = _table(joins)
        self._scores = tf.constant([processor.get_score(number) for number in range(size)], tf.float32)
        self._bytes = tf.constant([processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)], tf.int64)
        self._pieces = tf.constant(
            [_written(piece, special[number], is_byte[number]) for number, piece in enumerate(pieces)], tf.string
        )

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Token ids int32 [n, (tokens)] of texts, string [n], without begin and end."""
        texts = tf.strings.regex_replace(texts, _ESCAPE, _ESCAPE + "0")
        texts = tf.strings.regex_replace(texts, _SPACE_MARK, _ESCAPE + "1")
        texts = tf.strings.regex_replace(texts, " ", _SPACE_MARK)
        texts = tf.where(texts == "", "", _SPACE_MARK + texts)
        points = tf.strings.unicode_decode(texts, "UTF-8").to_tensor(-1)
        points = tf.cast(points, tf.int64)
        known = self._characters.lookup(points)
        symbols = tf.where(known >= 0, known, tf.where(points >= 0, self._size + points, -1))
        joined, _ = tf.while_loop(
            lambda _, more: more,
            lambda symbols, _: self._join(symbols),
            (symbols, tf.constant(True)),
            shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([])),
            parallel_iterations=1,
        )
        ids = self._ids(joined)
        return tf.cast(tf.ragged.boolean_mask(ids, ids >= 0), tf.int32)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Texts, string [n], of int32 [n, length]: each up to its first END, without padding and BEGIN."""
        ended = tf.cumsum(tf.cast(ids == END, tf.int32), axis=1) > 0
        is_text = ~ended & (ids != PADDING) & (ids != BEGIN)
        texts = tf.strings.reduce_join(tf.where(is_text, tf.gather(self._pieces, ids), ""), axis=1)
        texts = tf.strings.regex_replace(texts, "^ ", "")
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        texts = tf.strings.regex_replace(texts, _ESCAPE + "1", _SPACE_MARK)
        return tf.strings.regex_replace(texts, _ESCAPE + "0", _ESCAPE)

    def _join(self, symbols: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """One join in every row that has one; whether any row had."""
        right = tf.pad(symbols[:, 1:], [[0, 0], [0, 1]], constant_values=-1)
        both = (symbols >= 0) & (right >= 0)
        joint = self._joins.lookup(tf.where(both, symbols * self._stride + right, -1))
        scores = tf.where(joint >= 0, tf.gather(self._scores, tf.maximum(joint, 0)), tf.float32.min)
        # Without a single character there is nothing to take the largest of.
        if_any = tf.shape(symbols)[1] > 0
        padded = tf.pad(scores, [[0, 0], [0, 1]], constant_values=tf.float32.min)
        place = tf.argmax(padded, axis=1)[:, None]
        has_join = if_any & tf.reduce_any(joint >= 0, axis=1, keepdims=True)
        numbers = tf.range(tf.shape(symbols, tf.int64)[1])[None]
        changed = tf.where(numbers == place, joint, tf.where(numbers > place, right, symbols))
        return tf.where(has_join, changed, symbols), tf.reduce_any(has_join)

    def _ids(self, symbols: tf.Tensor) -> tf.Tensor:
        """Pieces as they are, other characters as the ids of their bytes; [n, 4 * length], -1 where there is none."""
        flat = tf.reshape(symbols, [-1, 1])
        is_character = flat >= self._size
        points = tf.cast(tf.where(is_character, flat - self._size, 0), tf.int32)
        characters = tf.strings.unicode_encode(points, "UTF-8")
        numbers = tf.io.decode_raw(characters, tf.uint8, fixed_length=4)
        is_byte = tf.range(4) < tf.strings.length(characters)[:, None]
        of_characters = tf.where(is_byte, tf.gather(self._bytes, tf.cast(numbers, tf.int32)), -1)
        of_pieces = tf.pad(flat, [[0, 0], [0, 3]], constant_values=-1)
        ids = tf.where(is_character, of_characters, of_pieces)
        return tf.reshape(ids, tf.shape(symbols) * [1, 4])


def _table(entries: dict[int, int]) -> tf.lookup.StaticHashTable:
    keys, values = tf.constant(list(entries), tf.int64), tf.constant(list(entries.values()), tf.int64)
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default_value=-1)


def _written(piece: str, special: bool, is_byte: bool) -> bytes:
    """The bytes that a piece adds to a text."""
    if special:
        return b""
    if is_byte:
        return bytes([int(piece[1:-1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode()
