"""What part of the bound comparable training runs have reached that were published, each with its source.

The rates are in published_rates.txt beside this file. Nothing is said of a model that none of them is of.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from launcher.preflight.roofline import Roofline
from launcher.reporting.units import milliseconds

_FILE = Path(__file__).with_name("published_rates.txt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """One training run that somebody published.

    Attributes:
      model: name and size of its input, such as "resnet50 224x224".
      accelerator_type: the slice it ran on.
      global_batch_size: of its steps.
      examples_per_second: of the whole slice.
      bound: this preflight's bound on the same.
      about: what its time has beside training steps.
      source: where to read it.
    """

    model: str
    accelerator_type: str
    global_batch_size: int
    examples_per_second: float
    bound: float
    about: str
    source: str

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.examples_per_second / self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step's time, if the run does as published ones did.

    Attributes:
      rates: the runs.
      step_seconds: shortest and longest.
    """

    rates: tuple[PublishedRate, ...]
    step_seconds: tuple[float, float]

    @property
    def shares(self) -> tuple[float, float]:
        """Of the bound, least and most."""
        shares = [rate.share for rate in self.rates]
        return min(shares), max(shares)

    @property
    def generations(self) -> tuple[str, ...]:
        """Of the TPUs that the runs were on."""
        return tuple(sorted({rate.accelerator_type.partition("-")[0] for rate in self.rates}))

    def __str__(self) -> str:
        (least, most), (shortest, longest) = self.shares, self.step_seconds
        return (
            f"{milliseconds(shortest)} to {milliseconds(longest)}, if it does as {len(self.rates)} published runs of "
            f"{self.rates[0].model} on {', '.join(self.generations)}, which reached {least:.0%} to {most:.0%} of theirs"
        )

    def rows(self) -> list[list[str]]:
        """A table of the runs, its heading first."""
        table = [["published run", "batch", "examples/s", "of the bound", "its time has", "source"]]
        for rate in self.rates:
            speed = f"{rate.examples_per_second:,.0f}"
            size = str(rate.global_batch_size)
            table.append([rate.accelerator_type, size, speed, f"{rate.share:.0%}", rate.about, rate.source])
        return table

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        return {
            "step_seconds": list(self.step_seconds),
            "shares_of_bound": list(self.shares),
            "published": [{**dataclasses.asdict(rate), "share_of_bound": rate.share} for rate in self.rates],
        }


@functools.cache
def published_rates() -> tuple[PublishedRate, ...]:
    """All of the file."""
    found = []
    for line in _FILE.read_text("utf-8").splitlines():
        if not line.startswith("#") and line.strip():
            model, where, batch, rate, bound, about, source = (cell.strip() for cell in line.split("|"))
            found.append(
                PublishedRate(
                    model=model,
                    accelerator_type=where,
                    global_batch_size=int(batch),
                    examples_per_second=float(rate),
                    bound=float(bound),
                    about=about,
                    source=source,
                )
            )
    return tuple(found)


def forecast(model: str, bounds: Roofline) -> Forecast | None:
    """What published runs of the same model say of a step; None where there are none, or not of steps bound like it.

    Args:
      model: as `PublishedRate.model`.
      bounds: of the step.
    """
    rates = tuple(rate for rate in published_rates() if rate.model == model)
    if not rates or bounds.bound_by != "HBM":
        return None
    shares = [rate.share for rate in rates]
    return Forecast(rates=rates, step_seconds=(bounds.step_seconds / max(shares), bounds.step_seconds / min(shares)))
