"""Texts held in lists, as the sources that the tests of batches pack."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from launcher.data.text import storage


@dataclasses.dataclass
class Listed:
    """A PairSource of pairs, or a TextSource of texts; counts how often the training texts are asked for."""

    training: list
    evaluation: list
    name: str = "listed"
    asked: int = 0

    def check(self) -> None:
        pass

    def digest(self) -> str:
        return storage.digest(self.training, self.evaluation)

    def train(self) -> Iterator:
        self.asked += 1
        return iter(self.training)

    def held_out(self) -> Iterator:
        return iter(self.evaluation)


def pairs(count: int, start: int = 0) -> list[tuple[str, str]]:
    """Sentences of different lengths."""
    return [
        (f"number {n}" + " and one more" * (n % 4), f"Zahl {n}" + " und noch eine" * (n % 4) + "." * (n % 3))
        for n in range(start, start + count)
    ]
