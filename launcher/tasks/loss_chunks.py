"""`train.loss_chunks`: when a loss over a vocabulary is computed in pieces, and in which."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Literal

from launcher.reporting.units import bytes_text

# Logits of up to so many bytes are computed whole: pieces would save little, and a small loop costs time. On a GPU
# pieces cost time always, for memory that a card of 40 GB and more has.
_WHOLE_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 256 << 20}
# A piece of the tokens has at most so many bytes of logits; on a GPU so many times the matrix's, if that is more. Each
# piece reads the matrix and adds to its gradient, about five passes over it, where its logits take six or seven.
_PIECE_BYTES, _MATRICES = 64 << 20, 4
# On a TPU, what a turn of the loop reads and writes is to stay in the vector memory: features, their gradients and the
# logits of one piece.
_FEATURES = 8_500_000
_TILE_BYTES = 40 << 20
# Or, in training with 16-bit operands, whole rows of logits: of so many tokens that the matrix's gradient is read and
# written under its own product (peak / bandwidth * 4 bytes of a v5e), and that 16-bit logits stay on the chip. That
# gradient is there before the backward pass through the model, and must be small beside it.
_TOKENS, _GRADIENT_BYTES = 1024, 256 << 20
LANES = 128


@dataclasses.dataclass(frozen=True)
class Split:
    """Pieces of the tokens, and within each piece, of the vocabulary; 1 for all of a token's logits at once.

    Attributes:
      narrow: whether logits of a bfloat16 head are kept in bfloat16, less the target's own, which costs few digits.
    """

    tokens: int = 1
    vocabulary: int = 1
    narrow: bool = False

    def __str__(self) -> str:
        parts = {"the tokens": self.tokens, "the vocabulary": self.vocabulary}
        return " and ".join(f"{count} pieces of {name}" for name, count in parts.items() if count > 1) or "one piece"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossChunks:
    """What a recipe says of pieces, and for which device: "cpu", "gpu" or "tpu".

    Attributes:
      pieces: "auto", 1 for whole logits, or a number: on a TPU of pieces of the vocabulary, elsewhere of the tokens.
    """

    pieces: int | Literal["auto"] = 1
    accelerator: str = "cpu"

    @property
    def forced(self) -> bool:
        """Whether the recipe asks for more than one piece."""
        return self.pieces not in ("auto", 1)

    def split(self, tokens: int, vocab_size: int, width: int, *, at_once: bool = False) -> Split | None:
        """The pieces of a loss over the tokens of one microbatch of one replica, whose features have `width` elements;
        None for whole logits. `at_once`: it is a 16-bit head's, and differentiated as it is computed.
        """
        logits_bytes = tokens * vocab_size * 4
        if self.pieces == 1 or (self.pieces == "auto" and logits_bytes <= _WHOLE_BYTES[self.accelerator]):
            return None
        if self.accelerator != "tpu":
            most = max(_PIECE_BYTES, _MATRICES * vocab_size * width * 4 if self.accelerator == "gpu" else 0)
            count = _of_tokens(tokens, -(-logits_bytes // most)) if self.pieces == "auto" else self.pieces
            return Split(tokens=min(count, tokens)) if count > 1 else None
        if at_once and self.pieces == "auto" and vocab_size * width * 4 <= _GRADIENT_BYTES:
            return Split(tokens=_of_tokens(tokens, -(-tokens // _TOKENS)), narrow=True)
        rows = _of_tokens(tokens, -(-tokens * width // _FEATURES))
        count = _of_vocabulary(vocab_size, -(-tokens // rows)) if self.pieces == "auto" else self.pieces
        return Split(tokens=rows, vocabulary=min(count, vocab_size))

    def describe(self, tokens: int, vocab_size: int, width: int, *, has_features: bool, at_once: bool = False) -> str:
        """What the plan says of `split`; `has_features`: the model gives these, and a matrix for logits of them."""
        split = self.split(tokens, vocab_size, width, at_once=at_once)
        why = f"the logits of a microbatch are {bytes_text(tokens * vocab_size * 4)}"
        if self.pieces != "auto":
            why = f"train.loss_chunks; {why}"
        if split is not None and not has_features:
            split, why = None, f"{why}; the model gives nothing else"
        return f"from whole logits ({why})" if split is None else f"in {split} ({why})"


def _of_tokens(tokens: int, least: int) -> int:
    """So many pieces, or somewhat more that are equal."""
    return next((count for count in range(least, 2 * least) if tokens % count == 0), least)


def _of_vocabulary(vocab_size: int, tokens: int) -> int:
    """The fewest pieces whose logits fit a tile; equal ones of whole lanes, if there are any of half that size."""
    most = max(LANES, _TILE_BYTES // (4 * tokens) // LANES * LANES)
    for size in range(most, most // 2, -LANES):
        if vocab_size % size == 0:
            return vocab_size // size
    return -(-vocab_size // most)


WHOLE = LossChunks()
_present: contextvars.ContextVar[LossChunks] = contextvars.ContextVar("loss_chunks", default=WHOLE)


@contextlib.contextmanager
def using(pieces: LossChunks) -> Iterator[None]:
    """What tasks compute in this block follows this setting."""
    token = _present.set(pieces)
    try:
        yield
    finally:
        _present.reset(token)


def present() -> LossChunks:
    """The setting of the step that is traced; whole logits where nobody says."""
    return _present.get()
