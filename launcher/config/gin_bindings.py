"""gin for Launcher: what recipes may bind, checked before anything is built, and what of it was really used.

gin forgives much that a training job must not: bindings that nothing reads, macros that nobody defined, a string
where a number belongs. Here each such mistake is one message with the file and line it came from and the nearest
right name. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gin

from launcher.config import bound_types
from launcher.config.gin_files import (
    Binding,
    Import,
    Name,
    defines,
    find_file,
    names_in,
    read_file,
    read_param,
    recipes,
    replace_names,
    search_path,
)
from launcher.config.gin_private import internals
from launcher.errors import LauncherError, UsageError, advice, failures, nearest, user_code

__all__ = [
    "Config",
    "bound",
    "check_all_used",
    "check_settings",
    "clean_message",
    "find_file",
    "load",
    "operative_config",
    "recipes",
    "reset",
    "save_operative",
    "search_path",
    "settings",
    "unused_bindings",
    "usage_errors",
    "used_as",
]

# Parameters that say the same thing in two ways: the one that is bound last counts.
_RIVALS = (("launcher.run.recipe.train", "steps", "epochs"),)

_MACRO = "gin.macro"  # gin keeps the macro NAME as the parameter `value` of gin.macro in scope NAME

_Key = tuple[str, str, str]  # scope, complete selector, parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What `load` read.

    Attributes:
      files: every file read, includes too, in the order in which they were opened.
      params: the `--gin_param` bindings, in order.
    """

    files: tuple[str, ...]
    params: tuple[str, ...]


@dataclasses.dataclass
class _Loaded:
    """What was bound last, beside gin's own global tables, which forget where a binding stood."""

    bound: dict[_Key, Binding] = dataclasses.field(default_factory=dict)
    overridden: list[tuple[Binding, int]] = dataclasses.field(default_factory=list)  # and the order of what won
    files: list[str] = dataclasses.field(default_factory=list)


_loaded = _Loaded()


def load(
    gin_files: Sequence[str], gin_params: Sequence[str] = (), *, before_imports: Callable[[], None] = lambda: None
) -> Config:
    """Replaces gin's configuration by these files and then these bindings, all checked.

    The modules whose configurables the files bind must have been imported, unless the files import them.

    Args:
      gin_files: looked for along `search_path()`, read in order; a later binding overrides an earlier one.
      gin_params: bindings such as "train.steps = 30", applied last.
      before_imports: called before the first module is imported, if any is; until it returns, bindings are in effect
        that need no import.

    Raises:
      UsageError: a file, name, parameter, macro or import is unknown, a value has the wrong type, or something required
        is missing. Nothing but `before_imports` has been called then.
    """
    reset()
    files = _loaded.files
    statements = [statement for name in gin_files for statement in read_file(find_file(name), opened=files)]
    statements += [read_param(param) for param in gin_params]
    imports = [statement for statement in statements if isinstance(statement, Import)]
    if imports:
        _bind_known([statement for statement in statements if isinstance(statement, Binding)])
        before_imports()
        reset()
        _loaded.files = files
    for wanted in imports:
        _import(wanted)
    for order, statement in enumerate(statements):
        if isinstance(statement, Binding):
            _bind(dataclasses.replace(statement, order=order))
    _take_the_last_of_rivals()
    _check_macros()
    _check_required()
    _check_values()
    return Config(files=tuple(files), params=tuple(gin_params))


def reset() -> None:
    """Forgets every binding and what was used of it; what is registered stays."""
    global _loaded
    gin.clear_config()
    _loaded = _Loaded()


# ----------------------------------------------------------------------------------------------------------- settings

_T = TypeVar("_T")
_settings: list[Callable[[], Any]] = []


def settings(name: str) -> Callable[[type[_T]], type[_T]]:
    """Registers a class of settings with gin as `name`; recipes may bind them whether or not this run reads them."""

    def register(made: type[_T]) -> type[_T]:
        configurable = gin.configurable(name)(made)
        _settings.append(configurable)
        return configurable

    return register


def check_settings() -> None:
    """Constructs every class of settings, so that what is bound of each is checked and counts as used.

    Raises:
      UsageError: a value that the class refuses.
    """
    for made in _settings:
        made()


# ------------------------------------------------------------------------------------------------------------ binding


def bound(parameter: str, default: Any) -> Any:
    """What a parameter such as "train.strategy" is bound to, before anything is called; `default` if it is not.

    Raises:
      UsageError: that is no plain value, and only a call would tell.
    """
    for (scope, selector, arg), binding in _loaded.bound.items():
        if scope or selector == _MACRO or f"{_short(selector)}.{arg}" != parameter:
            continue
        value = replace_names(binding.value, functools.partial(_value_of, binding))
        if names_in(value):
            raise UsageError(f"{binding}: must be a plain value, as it is needed before anything is called")
        return value
    return default


def _bind_known(bindings: Sequence[Binding]) -> None:
    """Binds and checks, of those that last, the bindings that need none of the modules still to be imported."""
    last = {binding.name: binding for binding in bindings}

    def is_known(binding: Binding, through: tuple[str, ...] = ()) -> bool:
        registry = internals().registry
        selectors = [name.selector for name in names_in(binding.value, "@")] + ([binding.selector] * bool(binding.arg))
        macros = [name.scoped for name in names_in(binding.value, "%") if not _constant(name, binding)]
        return all(len(registry.matching_selectors(selector)) == 1 for selector in selectors) and all(
            macro in last and macro not in through and is_known(last[macro], (*through, macro)) for macro in macros
        )

    for binding in filter(is_known, last.values()):
        _bind(binding)
    _check_values()


def _import(wanted: Import) -> None:
    if wanted.module.startswith("__gin__"):
        raise UsageError(f"{wanted.where}: {wanted.text}: not supported; decorate with @gin.configurable instead")
    if wanted.folder and wanted.folder not in sys.path:
        sys.path.insert(0, wanted.folder)  # for good: the module may import others beside it, also later
    try:
        importlib.import_module(wanted.module)
    except ModuleNotFoundError as error:
        if error.name and f"{wanted.module}.".startswith(f"{error.name}."):
            beside = "" if wanted.folder in ("", os.getcwd()) else f"beside the gin file ({wanted.folder}), "
            raise UsageError(
                f"{wanted.where}: no module named {wanted.module!r}; it was looked for {beside}in the working "
                f"directory ({os.getcwd()}), along PYTHONPATH and among the installed packages (sys.path)"
            ) from None
        raise UsageError(f"{wanted.where}: {wanted.text} failed: {_at_fault(error)}") from error
    except Exception as error:
        raise UsageError(f"{wanted.where}: {wanted.text} failed: {_at_fault(error)}") from error
    internals().imports.add(wanted.statement)


def _at_fault(error: Exception) -> str:
    place = user_code.raised_at(error)
    return f"{f'{place}: ' if place and not place.is_ours else ''}{user_code.summary(error)}"


def _bind(binding: Binding) -> None:
    key = (binding.name, _MACRO, "value")
    if binding.arg:
        configurable = _configurable(binding.selector, binding)
        parameters, is_open = bound_types.parameters(configurable.wrapped)
        allowed = [
            name
            for name in parameters
            if name in (configurable.allowlist or parameters) and name not in (configurable.denylist or ())
        ]
        if binding.arg not in allowed and (binding.arg in parameters or not is_open):
            raise UsageError(
                f"{binding}: {binding.selector} has no parameter {binding.arg!r} to bind{advice(binding.arg, allowed)}"
            )
        key = (binding.scope, configurable.selector, binding.arg)
    try:
        gin.bind_parameter(key, replace_names(binding.value, functools.partial(_reference, binding)))
    except ValueError as error:
        raise UsageError(f"{binding}: {clean_message(error)}") from None
    if key in _loaded.bound:
        _loaded.overridden.append((_loaded.bound[key], binding.order))
    _loaded.bound[key] = binding


def _configurable(selector: str, binding: Binding) -> Any:
    registry = internals().registry
    matches = registry.matching_selectors(selector)
    if len(matches) == 1:
        return registry[matches[0]]
    if matches:
        names = ", ".join(_short(match) for match in sorted(matches))
        raise UsageError(f"{binding}: {selector!r} is ambiguous; write one of {names}")
    known = {_short(name) for name, _ in registry.items() if not name.startswith("gin.")}
    own = "" if nearest(selector, known) else "; if it is your own, import its module in the gin file"
    raise UsageError(f"{binding}: nothing is named {selector!r}{_in_a_file(selector) or advice(selector, known) + own}")


def _in_a_file(selector: str) -> str:
    """What to do where a file beside the gin files or in the working directory defines the name; "" if none does."""
    folders = dict.fromkeys([*(os.path.dirname(os.path.abspath(file)) for file in _loaded.files), os.getcwd()])
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.py"))):
        if defines(path, selector.rpartition(".")[2]):
            if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
                return f": {path.name} defines it, without @gin.configurable; put that above it"
            return f": {path.name} defines it; add 'import {path.stem}' to the gin file"
    return ""


def _reference(binding: Binding, name: Name) -> Any:
    """gin's object for a name in a value."""
    if name.sign == "@":
        _configurable(name.selector, binding)
        return internals().reference(name.scoped, name.evaluate)
    constant = _constant(name, binding)
    return internals().reference(f"{constant}/gin.constant" if constant else f"{name.scoped}/{_MACRO}", True)


def _constant(name: Name, binding: Binding) -> str | None:
    """Complete name of the `gin.constant` that `%name` means, None if it is a macro."""
    matches = internals().constants.matching_selectors(name.scoped)
    if len(matches) > 1:
        raise UsageError(f"{binding}: {name!r} is ambiguous; write one of {', '.join(sorted(matches))}")
    return str(matches[0]) if matches else None


# -------------------------------------------------------------------------------------------------- checks before use


def _take_the_last_of_rivals() -> None:
    """Unbinds, of two parameters that say the same thing, the one that was bound first.

    Raises:
      UsageError: they stand in one file, or both in --gin_param, where nobody meant to override.
    """
    for selector, *arguments in _RIVALS:
        found = [_loaded.bound[key] for arg in arguments if (key := ("", selector, arg)) in _loaded.bound]
        both = sorted((binding for binding in found if binding.value is not None), key=lambda binding: binding.order)
        if len(both) < 2:
            continue
        first, last = both
        if first.source == last.source:
            raise UsageError(
                f"{first} and {last} say the same thing in two ways: take one away, or write "
                f"{first.name} = None to let {last.arg} count"
            )
        _bind(dataclasses.replace(first, value=None, where=last.where, order=last.order))


def _check_macros() -> None:
    defined = {scope for scope, selector, _ in _loaded.bound if selector == _MACRO}
    # A macro that only an overridden binding mentions is no mistake of whoever overrides.
    mentioned = {name.scoped for binding, _ in _loaded.overridden for name in names_in(binding.value, "%")}
    for binding in _loaded.bound.values():
        for name in names_in(binding.value, "%"):
            mentioned.add(name.scoped)
            if name.scoped not in defined and not _constant(name, binding):
                raise UsageError(f"{binding}: macro {name!r} is not defined{advice(name.scoped, defined)}")
    for macro in sorted(defined):
        binding = _loaded.bound[macro, _MACRO, "value"]
        if macro not in mentioned:
            raise UsageError(f"{binding}: no binding mentions %{macro}{advice(macro, mentioned)}")
        _value_of(binding, Name("%", macro))


def _value_of(binding: Binding, name: Name, through: tuple[str, ...] = ()) -> Any:
    """The value of a macro or constant, with the macros within it; references stay as they are."""
    if name.sign == "@":
        return name
    constant = _constant(name, binding)
    if constant:
        return internals().constants[constant]
    if name.scoped in through:
        raise UsageError(f"{binding}: macros go round in a circle: {' -> '.join([*through, name.scoped])}")
    value = _loaded.bound[name.scoped, _MACRO, "value"].value
    return replace_names(value, lambda inner: _value_of(binding, inner, (*through, name.scoped)))


def _check_required() -> None:
    evaluated: set[str] = set()
    passed_on: set[str] = set()
    for binding in _loaded.bound.values():
        if any(_constant(name, binding) == "gin.REQUIRED" for name in names_in(binding.value, "%")):
            raise UsageError(f"{binding}: must be given: --gin_param '{binding.name} = ...'")
        for name in names_in(binding.value, "@"):
            (evaluated if name.evaluate else passed_on).add(_configurable(name.selector, binding).selector)
    # Whoever receives @name may supply the parameter itself; nobody can for @name() or for what no binding refers to.
    called = {selector for _, selector, _ in _loaded.bound} - passed_on - set(_replaced()) | evaluated
    for selector in sorted(called):
        parameters, _ = bound_types.parameters(internals().registry[selector].wrapped)
        bound = {arg for _, other, arg in _loaded.bound if other == selector}
        required = [name for name, parameter in parameters.items() if parameter.default is gin.REQUIRED]
        missing = [name for name in required if name not in bound]
        if missing:
            raise _missing(_short(selector), missing)


def _missing(configurable: str, parameters: Sequence[str]) -> UsageError:
    names = ", ".join(f"{configurable}.{parameter}" for parameter in parameters)
    return UsageError(
        f"required and not bound: {names}; bind it in a gin file "
        f"or with --gin_param '{configurable}.{parameters[0]} = ...'"
    )


def _check_values() -> None:
    for key, binding in list(_loaded.bound.items()):
        _, selector, arg = key
        parameter = bound_types.parameters(internals().registry[selector].wrapped)[0].get(arg)
        if selector == _MACRO or parameter is None:
            continue
        if isinstance(binding.value, Name) and binding.value.sign == "@":
            target = _configurable(binding.value.selector, binding).wrapped
            problem = parameter.problem_with_reference(target, repr(binding.value), evaluated=binding.value.evaluate)
        else:
            problem = _problem_with_value(key, binding, parameter)
        if problem:
            macros = [_loaded.bound.get((name.scoped, _MACRO, "value")) for name in names_in(binding.value, "%")]
            raise UsageError(f"{binding}: {problem}" + "".join(f" ({macro})" for macro in macros if macro))


def _problem_with_value(key: _Key, binding: Binding, parameter: bound_types.Parameter) -> str | None:
    """What is wrong with a value without references; a list where only a tuple will do is bound again as a tuple."""
    value = replace_names(binding.value, functools.partial(_value_of, binding))
    if names_in(value):
        return None
    problem = parameter.problem_with(value)
    if problem and not parameter.problem_with(bound_types.as_tuples(value)):
        if names_in(binding.value):
            return f"{problem}; write the macro's value in round brackets"
        gin.bind_parameter(key, bound_types.as_tuples(value))
        return None
    return problem


# ------------------------------------------------------------------------------------------------------ what was used


def check_all_used(*, traced: bool = True) -> None:
    """Refuses bindings that nothing has used; call it when everything has been built.

    Args:
      traced: as in `unused_bindings`.

    Raises:
      UsageError: naming each of `unused_bindings()`.
    """
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
            used.update([key for key in inward if key in _loaded.bound][-1:])
    called = {_target(scope, selector) for scope, selector in operative}
    replaced = {target: order for target, order in _replaced().items() if target not in called}
    return [
        f"{binding.name} = {binding.value!r} ({binding.where}): {_why_unused(key, operative, used)}"
        for key, binding in _loaded.bound.items()
        if key not in used and (traced or _is_launchers(key[1])) and binding.order > replaced.get(_target(*key[:2]), -1)
    ]


def _is_launchers(selector: str) -> bool:
    module = getattr(internals().registry[selector].wrapped, "__module__", "")
    return module.partition(".")[0] in ("launcher", "models")


def used_as(parameter: str, value: Any) -> tuple[str, ...]:
    """Bindings, such as "resnet.depth", by which the calls so far got `value`, bound or by default."""
    operative = internals().operative.items()
    return tuple(
        sorted({f"{_short(selector)}.{parameter}" for (_, selector), args in operative if args.get(parameter) is value})
    )


def _target(scope: str, selector: str) -> str:
    return f"%{scope}" if selector == _MACRO else selector


def _targets(binding: Binding) -> list[str]:
    return [
        f"%{name.scoped}" if name.sign == "%" else _configurable(name.selector, binding).selector
        for name in names_in(binding.value)
    ]


def _replaced() -> dict[str, int]:
    """Configurables and macros that overridden bindings led to, and the order of the last binding that overrode one."""
    replaced: dict[str, int] = {}
    waiting = [(target, order) for binding, order in _loaded.overridden for target in _targets(binding)]
    while waiting:
        target, order = waiting.pop()
        if replaced.get(target, -1) < order:
            replaced[target] = order
            behind = [binding for key, binding in _loaded.bound.items() if _target(*key[:2]) == target]
            waiting += [(inner, order) for binding in behind for inner in _targets(binding)]
    return replaced


def _why_unused(key: _Key, operative: Mapping[tuple[str, str], set[str]], used: set[_Key]) -> str:
    scope, selector, arg = key
    if selector == _MACRO:
        users = [binding.name for binding in _loaded.bound.values() if f"%{scope}" in _targets(binding)]
        return f"only {', '.join(users)} mentions it, and nothing used that" if users else "nothing mentions it"
    name = _short(selector)
    scopes = [called for called, other in operative if other == selector]
    if not scopes:
        return f"{name} is never called{_instead_of(selector, used)}"
    inside = [called for called in scopes if not scope or f"{called}/".startswith(f"{scope}/")]
    if not inside:
        return f"{name} is called, but not in scope {scope!r}"
    if any(arg in operative[called, selector] for called in inside):
        return f"every call of {name} takes {arg} from an inner scope"
    return f"whoever calls {name} sets {arg} itself"


def _instead_of(selector: str, used: set[_Key]) -> str:
    """The used binding that could have named `selector` but names another: the likely mistake."""
    wanted = bound_types.kind(internals().registry[selector].wrapped)
    for key, binding in _loaded.bound.items():
        for name in names_in(binding.value, "@") if key in used else []:
            if bound_types.kind(_configurable(name.selector, binding).wrapped) == wanted:
                return f"; {binding.name} is {name!r}"
    close = nearest(_short(selector), {_short(other) for _, other, _ in used if other != _MACRO})
    return f"; did you mean {close!r}?" if close else ""


def _short(selector: str) -> str:
    return str(internals().registry.minimal_selector(selector))


# ------------------------------------------------------------------------------------------------------- what is kept


def operative_config() -> str:
    """Every value that the calls so far were configured with, defaults too, as a gin file that `load` reads."""
    return str(gin.operative_config_str(max_line_length=110))


def save_operative(path: str) -> None:
    """Writes `operative_config()` to `path`, whole or not at all.

    Raises:
      OSError: the folder does not exist or is not writable.
    """
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path) or ".", prefix=".config-", suffix=".gin")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"# What this run was configured with.\n\n{operative_config()}")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp lets nobody else read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ------------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what comes out of configurables that gin called into what the user did wrong.

    Launcher's errors come out as they were raised, without gin's additions. A missing required binding, arguments that
    do not fit a configurable's signature, and what the user's own Python raised become a UsageError. All else passes
    unchanged.
    """
    try:
        yield
    except Exception as error:
        problem = _as_usage_error(error)
        if problem is error:
            raise
    else:
        return
    raise problem from problem.__cause__


def _as_usage_error(error: Exception) -> Exception:
    original = failures.unwrap(error)
    if isinstance(original, LauncherError):
        return original
    required = re.match(r"Required bindings for `(.*)` not provided in config: \[(.*)\]$", str(original))
    if isinstance(original, RuntimeError) and required:
        return _missing(required[1], re.findall(r"'(\w+)'", required[2]))
    frames = traceback.extract_tb(original.__traceback__)
    if isinstance(original, TypeError) and frames and frames[-1].filename == gin.config.__file__:
        return UsageError(f"{original}: bind the parameter, or take the binding away")
    problem = failures.explained(error)
    return problem if isinstance(problem, Exception) else error


def clean_message(error: BaseException) -> str:
    """The message as it was raised, without the lines that gin adds on its way through configurables."""
    return str(failures.unwrap(error))
