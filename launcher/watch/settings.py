"""How closely a training run looks at what 16 bits do to its gradients."""

from __future__ import annotations

import dataclasses

import gin

from launcher.errors import UsageError


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionWatch:
    """Samples the exponents of gradients during training; `train.precision_watch = @PrecisionWatch()`.

    Attributes:
      every: steps between samples. A sample takes about as long as some steps, see docs/precision_watch.md.
    """

    every: int = 200

    def __post_init__(self) -> None:
        if not self.every >= 1:
            raise UsageError(f"PrecisionWatch.every = {self.every}: must be 1 or more")
