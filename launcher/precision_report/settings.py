"""Settings of `--mode=precision_report`; recipes or `--gin_param` bind them as `precision_report.…`."""

import dataclasses

from launcher.config import gin_bindings
from launcher.config.bound_types import check_least
from launcher.errors import UsageError
from launcher.step.precision import POLICIES


@gin_bindings.settings("precision_report")
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionReportSettings:
    """Settings of a precision report.

    Attributes:
      batches: calibration batches, of the steps that follow the weights.
      policy: the policy to examine; None for the recipe's, and mixed_float16 where that is float32.
      layers: how many layers the tables show, the worst first; precision.json has all.
    """

    batches: int = 2
    policy: str | None = None
    layers: int = 8

    def __post_init__(self) -> None:
        check_least("precision_report", self, batches=1, layers=1)
        if self.policy is not None and self.policy not in POLICIES:
            raise UsageError(f"precision_report.policy = {self.policy!r}: expected one of {', '.join(POLICIES)}")

    def policy_for(self, resolved: str) -> str:
        """The policy to examine in a run whose own is `resolved`."""
        return self.policy or ("mixed_float16" if resolved == "float32" else resolved)
