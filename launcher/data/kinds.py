"""Kinds of `Data`: what it may have beside its five members, see `launcher.data.pipeline`."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class DataOfEpochs(Protocol):
    """`Data` whose epochs may be a whole number of steps."""

    def steps_per_epoch(self, global_batch_size: int) -> int | None:
        """Steps of an epoch; None where batches run on over the ends of epochs."""


@runtime_checkable
class DataWithPadding(Protocol):
    """`Data` that fills up a batch that replicas do not divide, with rows of weight 0 after all that are real."""

    pads_batches: bool


@runtime_checkable
class DataOfSteps(Protocol):
    """`Data` that says how many batches an evaluation has, where not all are full."""

    def eval_steps(self, global_batch_size: int) -> int:
        """Batches of one evaluation."""


@runtime_checkable
class DataWithIdentity(Protocol):
    """`Data`, or examples, that are known again."""

    def identity(self) -> str:
        """A text that changes where the training examples or their order do; quick."""


@runtime_checkable
class DataInTurn(Protocol):
    """`Data` whose batches something else gives, one after another.

    Attributes:
      batch_size: examples of a batch.
      note: what their order rests on.
      reads_again: whether to find a batch takes reading all before it, in TensorFlow.
      reads_once: whether an earlier batch is gone.
    """

    batch_size: int
    note: str
    reads_again: bool
    reads_once: bool


@runtime_checkable
class DataOfFiles(Protocol):
    """`Data` that finds the damage in files that it could not read."""

    def damage(self, *, seed: int, start: int, stop: int) -> str | None:
        """The damage at positions `start` to `stop` of the training stream, or of what is evaluated on, if any."""


@runtime_checkable
class DataAsStored(Protocol):
    """`Data` whose training batches come unfinished to a shard that is `as_stored`.

    Attributes:
      finish_stored: makes what the step takes of such a batch, and leaves a finished one as it is; None where there is
        nothing to do.
    """

    finish_stored: Callable[..., Any] | None


@runtime_checkable
class DataOfNumbers(Protocol):
    """`Data` whose training examples have numbers."""

    def example_at(self, position: int, seed: int) -> int:
        """The training example at a position of the training stream."""


@runtime_checkable
class DataWithName(Protocol):
    """`Data` that a person knows by a name.

    Attributes:
      details: what else should be known of it; may be empty.
    """

    name: str
    details: str


def pads_batches(data: Any) -> bool:
    """Whether the data fills up batches, see `DataWithPadding`."""
    return isinstance(data, DataWithPadding) and data.pads_batches


def reads_once(data: Any) -> bool:
    """Whether a batch that has been read is gone, see `DataInTurn`."""
    return isinstance(data, DataInTurn) and data.reads_once


def name_of(data: Any) -> str:
    """The name of the data, or else of its class."""
    return data.name if isinstance(data, DataWithName) else type(data).__name__


def identity_of(data: Any) -> str:
    """The identity of data or of examples, see `DataWithIdentity`; "" where they have none."""
    return data.identity() if isinstance(data, DataWithIdentity) else ""
