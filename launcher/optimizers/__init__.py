"""Keras optimizers as a recipe binds them: `train.optimizer = @adamw`."""

from launcher.optimizers.builders import adafactor, adam, adamw, lamb, lars, momentum
from launcher.optimizers.optimizer import NO_DECAY, Optimizer, has_rate_variable

__all__ = ["NO_DECAY", "Optimizer", "adafactor", "adam", "adamw", "has_rate_variable", "lamb", "lars", "momentum"]
