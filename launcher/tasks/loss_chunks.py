"""`train.loss_chunks`: when a loss over a vocabulary is computed in pieces, and in which."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Literal

# Logits of up to so many bytes are computed whole: pieces would save little, and a small loop costs time. On a GPU
# pieces cost time always, for memory that a card of 40 GB and more has.
_WHOLE_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 256 << 20}
# A piece has at most so many bytes of logits; on a GPU so many times the matrix's, if that is more. Each piece reads
# the matrix and adds to its gradient, about five passes over it, where its logits take six or seven.
_PIECE_BYTES, _MATRICES = 64 << 20, 4
# On a TPU a piece has so many tokens that the matrix's gradient is read and written under its own product (peak /
# bandwidth * 4 bytes of a v5e), and that 16-bit logits stay on the chip.
_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Split:
    """So many pieces of the tokens.

    Attributes:
      narrow: whether logits of a bfloat16 head are kept in bfloat16, less the target's own, which costs few digits.
    """

    tokens: int = 1
    narrow: bool = False

    def __str__(self) -> str:
        return f"{self.tokens} pieces of the tokens" if self.tokens > 1 else "one piece"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossChunks:
    """The recipe's word on pieces, and the device: "cpu", "gpu" or "tpu".

    Attributes:
      pieces: "auto", 1 for whole logits, or a number of pieces.
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
        most = max(_PIECE_BYTES, _MATRICES * vocab_size * width * 4 if self.accelerator == "gpu" else 0)
        least = -(-tokens // _TOKENS) if self.accelerator == "tpu" else -(-logits_bytes // most)
        # So many pieces, or somewhat more that are equal.
        equal = next((count for count in range(least, 2 * least) if tokens % count == 0), least)
        count = min(equal if self.pieces == "auto" else self.pieces, tokens)
        return Split(count, narrow=at_once and self.accelerator == "tpu") if count > 1 else None


WHOLE = LossChunks()
_present: contextvars.ContextVar[LossChunks] = contextvars.ContextVar("loss_chunks", default=WHOLE)


@contextlib.contextmanager
def using(pieces: LossChunks) -> Iterator[None]:
    """A block in which what tasks compute follows this setting."""
    token = _present.set(pieces)
    try:
        yield
    finally:
        _present.reset(token)


def present() -> LossChunks:
    """The setting of the step that is traced; whole logits where nobody says."""
    return _present.get()
