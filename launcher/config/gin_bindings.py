"""gin for Launcher: files and bindings, checked before anything is built.

gin forgives much that a training job must not: bindings that nothing reads, macros that nobody defined, a string
where a number belongs. Here each such mistake is one message with the file and line it came from and the nearest
right name. Imports no TensorFlow.
"""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gin

from launcher.config import bound_types, old_bindings, plugins
from launcher.config.gin_files import Binding, Import, Name, find_file, names_in, read_file, read_param, replace_names
from launcher.config.gin_private import internals
from launcher.config.user_modules import import_module, in_a_file
from launcher.errors import LauncherError, UsageError, advice, deprecation, failures, nearest

# Parameters that say the same thing in two ways: the one that is bound last counts.
_RIVALS = [("", "launcher.run.recipe.train", "steps"), ("", "launcher.run.recipe.train", "epochs")]

_PARAM = "--gin_param"  # the source of such a binding
MACRO = "gin.macro"  # gin keeps the macro NAME as the parameter `value` of gin.macro in scope NAME

Key = tuple[str, str, str]  # scope, complete selector, parameter


@dataclasses.dataclass
class Loaded:
    """Bindings of the last load, beside gin's own global tables, which forget where a binding stood."""

    bound: dict[Key, Binding] = dataclasses.field(default_factory=dict)
    overridden: list[tuple[Binding, int]] = dataclasses.field(default_factory=list)  # and the order of what won
    files: list[str] = dataclasses.field(default_factory=list)  # includes too, in the order in which they were opened
    foreign: str | None = None  # as of `user_modules.import_module`


loaded = Loaded()


def load(
    gin_files: Sequence[str],
    gin_params: Sequence[str] = (),
    *,
    before_imports: Callable[[], None] = lambda: None,
    called_by_program: Sequence[str] = (),
    foreign: str | None = None,
) -> None:
    """Replaces gin's configuration by these files and then these bindings, all checked.

    The modules whose configurables the files bind must have been imported, unless the files import them.

    Args:
      gin_files: looked for along `gin_files.search_path()`, read in order; a later binding overrides an earlier one.
      gin_params: bindings such as "train.steps = 30", applied last.
      before_imports: called before the first module is imported, if any is; until it returns, bindings are in effect
        that need no import.
      called_by_program: configurables that a program calls, which gives them what they require.
      foreign: as in `user_modules.import_module`.

    Raises:
      UsageError: a file, name, parameter, macro or import is unknown, a value has the wrong type, or something required
        is missing. Nothing but `before_imports` has been called then.
    """
    reset()
    loaded.foreign, files = foreign, loaded.files
    statements = [statement for name in gin_files for statement in read_file(find_file(name), opened=files)]
    statements += [read_param(param) for param in gin_params]
    for one in statements:
        if isinstance(one, Binding) and one.was and not one.source.endswith("config.gin"):  # which a run has written
            deprecation.tell(f"{one.where}: {one.was}", one.name)
    imports = [statement for statement in statements if isinstance(statement, Import)]
    if imports:
        _bind_known([statement for statement in statements if isinstance(statement, Binding)])
        before_imports()
        reset()
        loaded.files = files
    for wanted in imports:
        import_module(wanted, foreign)
    for order, statement in enumerate(statements):
        if isinstance(statement, Binding):
            _bind(dataclasses.replace(statement, order=order))
    _take_the_last_of_rivals()
    _check_macros()
    _check_required(called_by_program)
    _check_values()


def reset() -> None:
    """Forgets every binding and what was used of it; what is registered stays."""
    gin.clear_config()
    loaded.bound.clear()
    loaded.overridden.clear()
    loaded.files = []


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
    """Constructs every class of settings, so that what is bound of each is checked and counts as used."""
    for made in _settings:
        made()


# ------------------------------------------------------------------------------------------------------------ binding


def bound(parameter: str, default: Any, *, reference: Any = None) -> Any:
    """The plain value that a parameter such as "train.strategy" is bound to, before any call; or `default`.

    Args:
      reference: returned where it is bound to what a module of the user's makes; None to refuse that.
    """
    for (scope, selector, arg), binding in loaded.bound.items():
        if scope or selector == MACRO or f"{short_name(selector)}.{arg}" != parameter:
            continue
        value = replace_names(binding.value, functools.partial(_value_of, binding))
        if names_in(value) and reference is not None:
            return reference
        if names_in(value):
            raise UsageError(f"{binding}: must be a plain value, as it is needed before anything is called")
        return value
    return default


def changed() -> list[tuple[str, str | None, str]]:
    """Bindings of `--gin_param`: the name, what the files bind it to, or None, and its value; each as text."""
    replaced = {(order, old.scope, old.arg): old for old, order in loaded.overridden}
    found = []
    for binding in loaded.bound.values():
        before: Binding | None = binding
        while before is not None and before.source == _PARAM:
            before = replaced.get((before.order, before.scope, before.arg))
        if binding.source == _PARAM:
            found.append((binding.name, None if before is None else repr(before.value), repr(binding.value)))
    return found


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


def _bind(binding: Binding) -> None:
    key = (binding.name, MACRO, "value")
    if binding.arg:
        configurable = find_configurable(binding.selector, binding)
        parameters, is_open = bound_types.parameters(configurable.wrapped)
        allowed = [
            name
            for name in parameters
            if name in (configurable.allowlist or parameters) and name not in (configurable.denylist or ())
        ]
        if binding.arg not in allowed and (binding.arg in parameters or not is_open):
            meant = old_bindings.instead(f"{binding.selector}.{binding.arg}") or advice(binding.arg, allowed)
            raise UsageError(f"{binding}: no parameter {binding.arg!r} to bind{meant}")
        key = (binding.scope, configurable.selector, binding.arg)
    try:
        gin.bind_parameter(key, replace_names(binding.value, functools.partial(_reference, binding)))
    except ValueError as error:
        raise UsageError(f"{binding}: {failures.unwrap(error)}") from None
    if key in loaded.bound:
        loaded.overridden.append((loaded.bound[key], binding.order))
    loaded.bound[key] = binding


def find_configurable(selector: str, binding: Binding) -> Any:
    registry = internals().registry
    matches = registry.matching_selectors(selector)
    if not matches:
        _import_sink(selector, binding)
        matches = registry.matching_selectors(selector)
    if len(matches) == 1:
        return registry[matches[0]]
    if matches:
        names = ", ".join(short_name(match) for match in sorted(matches))
        raise UsageError(f"{binding}: {selector!r} is ambiguous; write one of {names}")
    known = {short_name(name) for name, _ in registry.items() if not name.startswith("gin.")}
    known |= {*plugins.entries(plugins.SINKS)}
    own = "" if nearest(selector, known) else "; if it is your own, import its module in the gin file"
    raise UsageError(
        f"{binding}: nothing is named {selector!r}{in_a_file(selector, loaded.files) or advice(selector, known) + own}"
    )


def _import_sink(selector: str, binding: Binding) -> None:
    """Imports the module of an installed package that has the name as a sink, as the gin file would."""
    if (entry := plugins.entries(plugins.SINKS).get(selector)) is not None:
        where = f"{binding}: a package has {selector} as {entry.value}"
        wanted = Import(module=entry.module, text=f"import {entry.module}", where=where, folder="", statement=None)
        import_module(wanted, loaded.foreign)
        if not internals().registry.matching_selectors(selector):
            raise UsageError(f"{where}, which is no @gin.configurable of that name")


def _reference(binding: Binding, name: Name) -> Any:
    """gin's object for a name in a value."""
    if name.sign == "@":
        find_configurable(name.selector, binding)
        return internals().reference(name.scoped, name.evaluate)
    constant = _constant(name, binding)
    return internals().reference(f"{constant}/gin.constant" if constant else f"{name.scoped}/{MACRO}", True)


def _constant(name: Name, binding: Binding) -> str | None:
    """Complete name of the `gin.constant` that `%name` means, None if it is a macro."""
    matches = internals().constants.matching_selectors(name.scoped)
    if len(matches) > 1:
        raise UsageError(f"{binding}: {name!r} is ambiguous; write one of {', '.join(sorted(matches))}")
    return str(matches[0]) if matches else None


# -------------------------------------------------------------------------------------------------- checks before use


def _take_the_last_of_rivals() -> None:
    """Unbinds, of two parameters that say the same thing, the one that was bound first.

    Where both stand in one file, or both in --gin_param, nobody meant to override: that is an error.
    """
    found = [loaded.bound[key] for key in _RIVALS if key in loaded.bound and loaded.bound[key].value is not None]
    if len(found) < 2:
        return
    first, last = sorted(found, key=lambda binding: binding.order)
    if first.source == last.source:
        raise UsageError(f"{first} and {last} say the same thing: take one away, or write {first.name} = None")
    _bind(dataclasses.replace(first, value=None, where=last.where, order=last.order))


def _check_macros() -> None:
    defined = {scope for scope, selector, _ in loaded.bound if selector == MACRO}
    # A macro that only an overridden binding mentions is no mistake of whoever overrides.
    mentioned = {name.scoped for binding, _ in loaded.overridden for name in names_in(binding.value, "%")}
    for binding in loaded.bound.values():
        for name in names_in(binding.value, "%"):
            mentioned.add(name.scoped)
            if name.scoped not in defined and not _constant(name, binding):
                raise UsageError(f"{binding}: macro {name!r} is not defined{advice(name.scoped, defined)}")
    for macro in sorted(defined):
        binding = loaded.bound[macro, MACRO, "value"]
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
    value = loaded.bound[name.scoped, MACRO, "value"].value
    return replace_names(value, lambda inner: _value_of(binding, inner, (*through, name.scoped)))


def _check_required(called_by_program: Sequence[str]) -> None:
    evaluated: set[str] = set()
    passed_on: set[str] = set()
    for binding in loaded.bound.values():
        if any(_constant(name, binding) == "gin.REQUIRED" for name in names_in(binding.value, "%")):
            raise UsageError(f"{binding}: must be given: --gin_param '{binding.name} = ...'")
        for name in names_in(binding.value, "@"):
            (evaluated if name.evaluate else passed_on).add(find_configurable(name.selector, binding).selector)
    # Whoever receives @name may supply the parameter itself; nobody can for @name() or for what no binding refers to.
    called = {selector for _, selector, _ in loaded.bound} - passed_on - set(overridden_targets()) | evaluated
    for selector in sorted(called):
        if short_name(selector) in called_by_program:
            continue
        parameters, _ = bound_types.parameters(internals().registry[selector].wrapped)
        bound = {arg for _, other, arg in loaded.bound if other == selector}
        required = [name for name, parameter in parameters.items() if parameter.default is gin.REQUIRED]
        missing = [name for name in required if name not in bound]
        if missing:
            raise missing_bindings(short_name(selector), missing)


def _check_values() -> None:
    for key, binding in list(loaded.bound.items()):
        _, selector, arg = key
        parameter = bound_types.parameters(internals().registry[selector].wrapped)[0].get(arg)
        if selector == MACRO or parameter is None:
            continue
        if isinstance(binding.value, Name) and binding.value.sign == "@":
            target = find_configurable(binding.value.selector, binding).wrapped
            problem = parameter.problem_with_reference(target, repr(binding.value), evaluated=binding.value.evaluate)
        else:
            problem = _problem_with_value(key, binding, parameter)
        if problem:
            macros = [loaded.bound.get((name.scoped, MACRO, "value")) for name in names_in(binding.value, "%")]
            raise UsageError(f"{binding}: {problem}" + "".join(f" ({macro})" for macro in macros if macro))


def _problem_with_value(key: Key, binding: Binding, parameter: bound_types.Parameter) -> str | None:
    """Problem with a value without references, or None; a list where only a tuple will do is bound again as a tuple."""
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


# --------------------------------------------------------------------------------------------- what bindings lead to


def target_of(scope: str, selector: str) -> str:
    return f"%{scope}" if selector == MACRO else selector


def targets_of(binding: Binding) -> list[str]:
    return [
        f"%{name.scoped}" if name.sign == "%" else find_configurable(name.selector, binding).selector
        for name in names_in(binding.value)
    ]


def overridden_targets() -> dict[str, int]:
    """Configurables and macros that overridden bindings led to, and the order of the last binding that overrode one."""
    replaced: dict[str, int] = {}
    waiting = [(target, order) for binding, order in loaded.overridden for target in targets_of(binding)]
    while waiting:
        target, order = waiting.pop()
        if replaced.get(target, -1) < order:
            replaced[target] = order
            behind = [binding for key, binding in loaded.bound.items() if target_of(*key[:2]) == target]
            waiting += [(inner, order) for binding in behind for inner in targets_of(binding)]
    return replaced


def short_name(selector: str) -> str:
    return str(internals().registry.minimal_selector(selector))


# ------------------------------------------------------------------------------------------------------------- errors


def missing_bindings(configurable: str, parameters: Sequence[str]) -> UsageError:
    """Error about parameters that must be bound and are not."""
    names = ", ".join(f"{configurable}.{parameter}" for parameter in parameters)
    return UsageError(f"required and not bound: {names}; --gin_param '{configurable}.{parameters[0]} = ...'")


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
        return missing_bindings(required[1], re.findall(r"'(\w+)'", required[2]))
    frames = traceback.extract_tb(original.__traceback__)
    if isinstance(original, TypeError) and frames and frames[-1].filename == gin.config.__file__:
        return UsageError(f"{original}: bind the parameter, or take the binding away")
    problem = failures.explained(error)
    return problem if isinstance(problem, Exception) else error
