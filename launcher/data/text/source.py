"""Sources of texts and images: what one of texts offers, and which one a bound name means."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from launcher.errors import UsageError, advice

Item_co = TypeVar("Item_co", covariant=True)


class Source(Protocol[Item_co]):
    """Texts: documents (`Source[str]`) or pairs (`Source[Pair]`). Making one reads nothing."""

    name: str

    def check(self) -> None:
        """Raises UsageError where the texts are not to be had."""

    def digest(self) -> str:
        """Changes when the texts change; quick."""

    def train(self) -> Iterator[Item_co]:
        """The texts to train on, in an order that is always the same."""

    def held_out(self) -> Iterator[Item_co]:
        """The texts to evaluate on; there may be none."""


def chosen(
    binding: str,
    name: str | None,
    source: Any | None,
    kinds: Mapping[str, Callable[..., Any]],
    known: Iterable[str] = (),
) -> Any:
    """The source that a name means, or else the one that is bound.

    A bound name goes before a bound source, so that one --gin_param trains a recipe on other data.

    Args:
      binding: gin name of what takes the source, for messages.
      name: a key of `kinds`, and behind its colon, if it has one, the first argument of what makes the source.
      source: bound in place of a name.
      kinds: what makes a source, by its name or by "PREFIX:".
      known: examples of whole names, for advice.
    """
    if name is None:
        if source is None:
            raise UsageError(f"required and not bound: {binding}.source, or {binding}.name")
        return source
    kind, colon, place = name.partition(":")
    if kind + colon in kinds:
        return kinds[kind + colon](*([place] if colon else []))
    raise UsageError(f"{binding}.name = {name!r} is unknown{advice(kind + colon, [*kinds, *known])}")
