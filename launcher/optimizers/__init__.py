"""Keras optimizers as a recipe binds them: `train.optimizer = @adamw`."""

from launcher.optimizers.builders import adafactor, adam, adamw, lamb, lars, momentum, muon, nadam
from launcher.optimizers.optimizer import NO_DECAY, Optimizer
from launcher.optimizers.several import Optimizers

__all__ = [
    "NO_DECAY",
    "Optimizer",
    "Optimizers",
    "adafactor",
    "adam",
    "adamw",
    "lamb",
    "lars",
    "momentum",
    "muon",
    "nadam",
]
