"""What part of the bound comparable training runs have reached that were published, each with its source.

The rates are in published_rates.txt beside this file. Nothing is said of a model that none of them is of.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from launcher.preflight.roofline import Roofline
from launcher.reporting.units import milliseconds, plural

_FILE = Path(__file__).with_name("published_rates.txt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """One training run that somebody published."""

    model: str  # that it is comparable with: name and size of its input, such as "resnet50 224x224"
    name: str  # what it was, for people
    accelerator_type: str  # as `--tpu_type` and `--gpu_type` have it
    global_batch_size: int
    examples_per_second: float  # of all its devices
    bound: float  # this preflight's, on the same
    bound_by: str  # as `Roofline.bound_by`
    about: str  # what its time has beside training steps
    source: str

    @property
    def accelerator(self) -> str:
        return "gpu" if ":" in self.accelerator_type else "tpu"

    @property
    def device(self) -> str:
        """The generation of TPU, or the card."""
        name, colon, _ = self.accelerator_type.partition(":")
        return name if colon else name.partition("-")[0]

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.examples_per_second / self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step's time, if the run does as published ones did; `bound_seconds` is what it takes at least."""

    rates: tuple[PublishedRate, ...]
    bound_seconds: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of the bound, least and most."""
        shares = [rate.share for rate in self.rates]
        return min(shares), max(shares)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Shortest and longest."""
        least, most = self.shares
        return self.bound_seconds / most, self.bound_seconds / least

    def __str__(self) -> str:
        (least, most), (shortest, longest) = self.shares, self.step_seconds
        share, time = f"{least:.0%}", milliseconds(longest)
        if len(self.rates) > 1:
            share, time = f"{share} to {most:.0%}", f"{milliseconds(shortest)} to {time}"
        devices = ", ".join(sorted({rate.device for rate in self.rates}))
        return (
            f"{time}, if it does as {plural(len(self.rates), 'published run')} of {self.rates[0].name} on {devices}, "
            f"which reached {share} of the bound"
        )

    def rows(self) -> list[list[str]]:
        """A table of the runs, its heading first."""
        table = [["published run", "batch", "examples/s", "of the bound", "its time has", "source"]]
        for rate in self.rates:
            numbers = [str(rate.global_batch_size), f"{rate.examples_per_second:,.0f}", f"{rate.share:.0%}"]
            table.append([rate.accelerator_type, *numbers, rate.about, rate.source])
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
            model, where, batch, rate, bound, bound_by, about, source = (cell.strip() for cell in line.split("|"))
            found.append(
                PublishedRate(
                    model=model.partition(": ")[0],
                    name=model.rpartition(": ")[2],
                    accelerator_type=where,
                    global_batch_size=int(batch),
                    examples_per_second=float(rate),
                    bound=float(bound),
                    bound_by=bound_by,
                    about=about,
                    source=source,
                )
            )
    return tuple(found)


def forecast(model: str, bounds: Roofline, accelerator: str) -> Forecast | None:
    """What published runs of a `PublishedRate.model` say of a step; None without any whose steps are bound like it."""
    wanted = model, bounds.bound_by, accelerator
    rates = tuple(one for one in published_rates() if (one.model, one.bound_by, one.accelerator) == wanted)
    return Forecast(rates=rates, bound_seconds=bounds.step_seconds) if rates else None
