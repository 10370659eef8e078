"""What the tests' recipes can bind, and how they write and load one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gin
import pytest

from launcher.config import gin_bindings
from launcher.errors import UsageError

if TYPE_CHECKING:
    from decimal import Decimal


# What a recipe can bind here; the names are nobody else's, for gin's registry is one for the process.


class Descent:
    def __init__(self, rate):
        self.rate = rate


class Pictures:
    def __init__(self, shape):
        self.shape = shape


@gin.configurable
def slow_descent(*, rate: float | Callable[[int], float] = 0.1, decay: float = 0.0) -> Descent:
    return Descent(rate)


@gin.configurable
def fast_descent(*, rate: float = 0.1, beta: float = 0.9) -> Descent:
    return Descent(rate)


@gin.configurable
def warm_schedule(*, peak: float = 1.0) -> Callable[[int], float]:
    return lambda step: peak * step


@gin.configurable
def pictures(*, shape: tuple[int, int, int] = (8, 8, 1), names: Sequence[str] = ()) -> Pictures:
    return Pictures(shape)


@gin.configurable
def anything(*, value=None, later: Decimal | None = None, **options):
    return value


@gin.configurable(denylist=["hidden"])
def job(
    *,
    optimizer: Callable[[], Descent] = gin.REQUIRED,
    data: Pictures = gin.REQUIRED,
    steps: int = gin.REQUIRED,
    rate: float = 1.0,
    flag: bool = False,
    wire: Literal["auto", "float16"] = "auto",
    limit: float | None = None,
    note: str = None,  # noqa: RUF013
    sizes: tuple[int, ...] | None = None,
    hidden: int = 0,
) -> dict[str, Any]:
    return {"optimizer": optimizer(), "data": data, "steps": steps, "rate": rate, "sizes": sizes, "wire": wire}


BASE = """\
# A base that works.
job.optimizer = @slow_descent
job.data = @pictures()
job.steps = 10
"""


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def refusal(text="", *params, base=BASE):
    """The message that a recipe with this text and these --gin_param is refused with."""
    write("recipe.gin", base + textwrap.dedent(text))
    with pytest.raises(UsageError) as caught:
        gin_bindings.load(["recipe.gin"], params)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "In call to configurable" not in message
    return message


def loaded(text="", *params, base=BASE):
    write("recipe.gin", base + textwrap.dedent(text))
    return gin_bindings.load(["recipe.gin"], params)
