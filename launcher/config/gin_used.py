"""Use of the bindings by a run: unused ones are errors, and the used ones are kept as config.gin."""

import math
from typing import Any

import gin
import numpy as np

from launcher.config import bound_types
from launcher.config.gin_bindings import (
    MACRO,
    Key,
    find_configurable,
    loaded,
    overridden_targets,
    short_name,
    target_of,
    targets_of,
)
from launcher.config.gin_files import names_in
from launcher.config.gin_private import internals
from launcher.errors import UsageError, nearest


def check_all_used(*, traced: bool = True) -> None:
    """Raises UsageError naming each of `unused_bindings`; for when everything has been built."""
    unused = unused_bindings(traced=traced)
    if unused:
        raise UsageError("bound but never used: " + "\n  ".join(unused if len(unused) == 1 else ["", *unused]))


def unused_bindings(*, traced: bool = True) -> list[str]:
    """Bindings and macros that no call has consumed so far: each with its place and why nothing used it.

    What only an overridden binding referred to is not among them: on a recipe with `train.optimizer = @momentum`,
    `--gin_param 'train.optimizer = @adam'` must work although the recipe binds `momentum.learning_rate` as well.

    Args:
      traced: whether the training step has been traced; without that, only Launcher's own names are looked at: what a
        user's module makes configurable may be for its loss() or its training batches.
    """
    operative = {call: set(values) for call, values in list(internals().operative.items())}
    used = set()
    for (scope, selector), args in operative.items():
        scopes = scope.split("/") if scope else []
        for arg in args:
            # gin takes the value from the innermost scope that binds it.
            inward = [("/".join(scopes[:depth]), selector, arg) for depth in range(len(scopes) + 1)]
            used.update([key for key in inward if key in loaded.bound][-1:])
    called = {target_of(scope, selector) for scope, selector in operative}
    selectors = {selector for _, selector in operative}
    replaced = {target: order for target, order in overridden_targets().items() if target not in called}
    return [
        f"{binding.name} = {binding.value!r} ({binding.where}): {_why_unused(key, selectors, used)}"
        for key, binding in loaded.bound.items()
        if key not in used
        and (traced or _is_launchers(key[1]))
        and binding.order > replaced.get(target_of(*key[:2]), -1)
    ]


def _is_launchers(selector: str) -> bool:
    module = getattr(internals().registry[selector].wrapped, "__module__", "")
    return module.partition(".")[0] == "launcher"


def _why_unused(key: Key, called: set[str], used: set[Key]) -> str:
    scope, selector, arg = key
    if selector == MACRO:
        users = [binding.name for binding in loaded.bound.values() if f"%{scope}" in targets_of(binding)]
        return f"only {', '.join(users)} mentions it, and nothing used that" if users else "nothing mentions it"
    name = short_name(selector)
    if selector not in called:
        return f"{name} is never called{_instead_of(selector, used)}"
    where = f" in scope {scope!r}" if scope else ""
    return f"no call of {name}{where} takes {arg} from it: whoever calls it sets {arg} itself, or an inner scope does"


def _instead_of(selector: str, used: set[Key]) -> str:
    """The used binding that could have named `selector` but names another: the likely mistake."""
    wanted = bound_types.kind(internals().registry[selector].wrapped)
    for key, binding in loaded.bound.items():
        for name in names_in(binding.value, "@") if key in used else []:
            if bound_types.kind(find_configurable(name.selector, binding).wrapped) == wanted:
                return f"; {binding.name} is {name!r}"
    close = nearest(short_name(selector), {short_name(other) for _, other, _ in used if other != MACRO})
    return f"; did you mean {close!r}?" if close else ""


def operative_config() -> str:
    """Every value that the calls so far were configured with, defaults too, as a gin file that `load` reads."""
    for used in list(internals().operative.values()):
        used.update(zip(used, map(_written, used.values()), strict=True))
    return str(gin.operative_config_str(max_line_length=110))


class _Infinite(float):
    def __repr__(self) -> str:
        return "1e999" if self > 0 else "-1e999"


def _written(value: Any) -> Any:
    """Value in a form that gin can write, which leaves out what it could not read: numbers of NumPy, infinite ones."""
    if type(value) in (list, tuple):
        return type(value)(map(_written, value))
    value = value.item() if isinstance(value, np.generic) else value
    return _Infinite(value) if isinstance(value, float) and math.isinf(value) else value
