"""The optimizers that recipes bind by name, momentum, adam, adamw, lamb, adafactor, lars, nadam, muon; all of Keras's.

Each returns an `Optimizer`, to be built under the strategy scope that it was called in, and raises UsageError where an
argument is out of range. Those named here decay no biases and normalisation parameters unless the recipe says so. Those
of Keras, such as `@keras.optimizers.RMSprop`, have Keras's own arguments, defaults and weight decay; the learning rate
may also be one of `launcher.optimizers.schedules`.

Args:
  learning_rate: a number or a schedule.
  beta_1, beta_2: decay rates of the moments.
  nesterov: whether to look ahead.
  exclude_from_decay: regular expressions; weights whose path matches one are not decayed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import keras

from launcher.config.bound_types import check_value, checked_patterns
from launcher.errors import UsageError
from launcher.optimizers.methods import LAMB, LARS, Adafactor, Muon, Nadam
from launcher.optimizers.optimizer import NO_DECAY, Optimizer
from launcher.optimizers.schedules import Schedule

# The name that recipes may write in full, wherever the functions stand.
_configurable = gin.configurable(module="launcher.optimizers")

_RATE = ("from 0 to less than 1", lambda value: 0.0 <= value < 1.0)
_POSITIVE = ("a finite number above 0", lambda value: math.isfinite(value) and value > 0.0)
_NOT_NEGATIVE = ("a finite number, 0 or more", lambda value: math.isfinite(value) and value >= 0.0)


@_configurable
def momentum(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """Stochastic gradient descent with momentum, and L2 weight decay added to the gradient.

    Args:
      learning_rate: a number or a schedule. The velocity holds updates already multiplied by it.
      momentum: decay rate of the velocity; 0 for plain descent.
      weight_decay: L2 coefficient.
    """
    _checked("momentum", _RATE, momentum=momentum)
    return Optimizer(
        keras.optimizers.SGD(momentum=float(momentum), nesterov=nesterov, name="momentum"),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decoupled=False,
        exclude_from_decay=exclude_from_decay,
    )


@_configurable
def adam(
    *, learning_rate: float | Schedule = gin.REQUIRED, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7
) -> Optimizer:
    """Adam (Kingma & Ba 2015, arXiv 1412.6980) without weight decay.

    Args:
      epsilon: added to the root of the second moment before its bias correction, "epsilon hat" in the paper.
    """
    moments = _moments("adam", beta_1, beta_2, epsilon)
    return Optimizer(keras.optimizers.Adam(**moments, name="adam"), learning_rate=learning_rate)


@_configurable
def adamw(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    weight_decay: float = 0.01,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101), scaled by the learning rate.

    Args:
      epsilon: as in `adam`.
      weight_decay: part of a weight, times the learning rate, that each step takes away.
    """
    moments = _moments("adamw", beta_1, beta_2, epsilon)
    return Optimizer(
        keras.optimizers.Adam(**moments, name="adamw"),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        decoupled=True,
        exclude_from_decay=exclude_from_decay,
    )


@_configurable
def lamb(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.01,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """LAMB for very large batches, see `launcher.optimizers.methods.LAMB`.

    Args:
      epsilon: added to the root of the bias-corrected second moment.
      weight_decay: decay inside the trust ratio.
      exclude_from_decay: regular expressions; weights whose path matches one get no decay and no trust ratio.
    """
    moments = _moments("lamb", beta_1, beta_2, epsilon)
    return _decays_itself("lamb", LAMB, learning_rate, weight_decay, exclude_from_decay, **moments)


@_configurable
def adafactor(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    decay: float = 0.8,
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """Adafactor for models whose second moments would not fit, see `launcher.optimizers.methods.Adafactor`.

    Args:
      learning_rate: a number or a schedule, relative to each variable's size; `@inverse_square_root()` with a peak of
        1e-2 and 10,000 steps of warm-up is the paper's own.
      decay: how fast the decay rate of the second moments rises to 1.
      clip_threshold: the largest root mean square of an update, before the learning rate.
      weight_decay: part of a weight, times the learning rate, that each step takes away; of the weight before the
        step, whose size the update is relative to as well.
    """
    settings = _checked("adafactor", _RATE, decay=decay)
    settings |= _checked("adafactor", _POSITIVE, clip_threshold=clip_threshold)
    return _decays_itself("adafactor", Adafactor, learning_rate, weight_decay, exclude_from_decay, **settings)


@_configurable
def lars(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    momentum: float = 0.9,
    nesterov: bool = False,
    trust_coefficient: float = 0.001,
    epsilon: float = 0.0,
    weight_decay: float = 1e-4,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """LARS for very large batches, see `launcher.optimizers.methods.LARS`.

    Args:
      momentum: decay rate of the velocity.
      trust_coefficient: trust coefficient.
      epsilon: added to the denominator of the trust ratio.
      weight_decay: decay inside the trust ratio.
      exclude_from_decay: regular expressions; weights whose path matches one get no decay and no trust ratio.
    """
    settings = _checked("lars", _RATE, momentum=momentum)
    settings |= _checked("lars", _NOT_NEGATIVE, trust_coefficient=trust_coefficient, epsilon=epsilon)
    return _decays_itself("lars", LARS, learning_rate, weight_decay, exclude_from_decay, nesterov=nesterov, **settings)


@_configurable
def nadam(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    momentum_decay: float = 0.004,
    weight_decay: float = 0.0,
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """Adam with Nesterov's momentum, as in its paper and in PyTorch, see `launcher.optimizers.methods.Nadam`.

    Args:
      epsilon: added to the root of the bias-corrected second moment.
      momentum_decay: how fast the momentum warms up to `beta_1`.
      weight_decay: part of a weight, times the learning rate, that each step takes away.
    """
    moments = _moments("nadam", beta_1, beta_2, epsilon)
    moments |= _checked("nadam", _NOT_NEGATIVE, momentum_decay=momentum_decay)
    return _decays_itself("nadam", Nadam, learning_rate, weight_decay, exclude_from_decay, **moments)


@_configurable
def muon(
    *,
    learning_rate: float | Schedule = gin.REQUIRED,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    rms: float | None = 0.2,
    adam_rate: float = 1.0,
    beta_1: float = 0.9,
    beta_2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.1,
    by_adam: Sequence[str] = Muon.defaults["by_adam"],
    heads_last: Sequence[str] = Muon.defaults["heads_last"],
    exclude_from_decay: Sequence[str] = NO_DECAY,
) -> Optimizer:
    """Muon for matrices, attention's among them, and AdamW for the rest, see `launcher.optimizers.methods.Muon`.

    Args:
      momentum: decay rate of the velocity of matrices.
      beta_1, beta_2: decay rates of AdamW's moments.
      epsilon: added to the root of AdamW's second moment.
      ns_steps: iterations that make an update orthogonal.
      rms: root mean square of a matrix's update before the rate; None for the first paper's scale.
      adam_rate: multiplies the rate of the weights that AdamW updates.
      weight_decay: part of a weight, times the learning rate, that each step takes away.
      by_adam: regular expressions; weights whose path matches one are AdamW's, as all vectors are.
      heads_last: regular expressions; of a matching weight with more axes than two, the first one is that of inputs.
    """
    settings: dict[str, Any] = _moments("muon", beta_1, beta_2, epsilon) | _checked("muon", _RATE, momentum=momentum)
    settings |= _checked("muon", _POSITIVE, adam_rate=adam_rate) | (
        {} if rms is None else _checked("muon", _POSITIVE, rms=rms)
    )
    check_value("muon.ns_steps", ns_steps, ns_steps >= 1, "1 or more")
    settings |= {name: checked_patterns(name, of) for name, of in (("by_adam", by_adam), ("heads_last", heads_last))}
    settings |= {"nesterov": nesterov, "ns_steps": ns_steps, "rms": rms}
    return _decays_itself("muon", Muon, learning_rate, weight_decay, exclude_from_decay, **settings)


def _register_keras(of: type[keras.optimizers.Optimizer]) -> None:
    """Makes an optimizer of Keras known to gin as `keras.optimizers.NAME`."""
    taken = [each for each in inspect.signature(of).parameters.values() if each.kind is not each.VAR_KEYWORD]

    def make(**arguments: Any) -> Optimizer:
        rate = arguments.get("learning_rate")
        is_ours = callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        given = {name: value for name, value in arguments.items() if not (is_ours and name == "learning_rate")}
        if isinstance(rate, int) and not isinstance(rate, bool):
            given["learning_rate"] = float(rate)
        try:
            return Optimizer(of(**given), learning_rate=rate if is_ours else None)
        except (TypeError, ValueError) as error:
            raise UsageError(f"keras.optimizers.{of.__name__}: {error}") from None

    make.__name__ = make.__qualname__ = of.__name__
    make.__doc__ = of.__doc__
    make.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    make.__annotations__ = {"return": Optimizer}
    gin.configurable(of.__name__, module="keras.optimizers")(make)


def _register_all_of_keras() -> None:
    """Makes Keras's optimizers, schedules and losses known to gin by Keras's names: `@keras.losses.Huber()`."""
    optimizers = keras.optimizers
    for name, kind in vars(optimizers).items():
        is_one = inspect.isclass(kind) and issubclass(kind, optimizers.Optimizer) and name == kind.__name__
        # Those that apply gradients in a manner of their own are wrappers around others.
        if is_one and kind is not optimizers.Optimizer and kind.apply is optimizers.Optimizer.apply:
            _register_keras(kind)
    for module, namespace, base in (
        ("keras.optimizers.schedules", optimizers.schedules, optimizers.schedules.LearningRateSchedule),
        ("keras.losses", keras.losses, keras.losses.Loss),
    ):
        for name, kind in vars(namespace).items():
            if inspect.isclass(kind) and issubclass(kind, base) and name == kind.__name__ != base.__name__:
                gin.external_configurable(kind, name, module=module)


_register_all_of_keras()


def _moments(optimizer: str, beta_1: float, beta_2: float, epsilon: float) -> dict[str, float]:
    """The arguments of Adam and of what derives from it, checked."""
    return _checked(optimizer, _RATE, beta_1=beta_1, beta_2=beta_2) | _checked(optimizer, _POSITIVE, epsilon=epsilon)


def _decays_itself(
    name: str,
    make: Callable[..., keras.optimizers.Optimizer],
    learning_rate: float | Schedule,
    weight_decay: float,
    exclude_from_decay: Sequence[str],
    **settings: Any,
) -> Optimizer:
    """One of Launcher's own Keras optimizers, whose weight decay is a part of its update."""
    _checked(name, _NOT_NEGATIVE, weight_decay=weight_decay)
    exclude = checked_patterns("exclude_from_decay", exclude_from_decay)
    return Optimizer(make(layer_decay=weight_decay, exclude=exclude, **settings), learning_rate=learning_rate)


def _checked(optimizer: str, allowed: tuple[str, Callable[[float], bool]], **values: float) -> dict[str, float]:
    what, is_allowed = allowed
    for name, value in values.items():
        check_value(f"{optimizer}.{name}", value, is_allowed(value), what)
    return values
