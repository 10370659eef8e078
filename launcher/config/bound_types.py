"""Whether a value bound in a gin file fits the parameter it is bound to, and is what it has to be."""

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

import typeguard

from launcher.errors import UsageError

_UNKNOWN = object()  # no annotation, or one that cannot be resolved at run time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a configurable: its default, and its annotation, resolved and as a person reads it."""

    default: Any
    hint: Any
    text: str

    def problem_with(self, value: Any) -> str | None:
        """Problem with a plain value, None if it fits. Ints fit float; bools fit neither int nor float."""
        if self.hint is _UNKNOWN or (value is None and self.default is None):
            return None
        wanted = f"expected {self.text}, got {type(value).__name__}"
        alternatives = _alternatives(self.hint)
        numeric = any(option in (int, float) for option in alternatives)
        if isinstance(value, bool) and numeric and not any(option in (bool, object, Any) for option in alternatives):
            return wanted
        try:
            typeguard.check_type(
                value,
                self.hint,
                forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
                collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
            )
        except typeguard.TypeCheckError as error:
            if isinstance(value, float) and value.is_integer() and int in alternatives:
                return f"{wanted}; write {int(value)}"
            detail = str(error) if isinstance(value, list | tuple | dict) and "\n" not in str(error) else ""
            return f"{wanted} ({detail})" if detail else wanted
        except Exception:  # an annotation that typeguard cannot read is no mistake of the user's
            return None
        return None

    def problem_with_reference(self, target: Any, text: str, *, evaluated: bool) -> str | None:
        """Whether `@name` stands where only `@name()` can be meant, or the other way round."""
        alternatives = _alternatives(self.hint)
        if not evaluated and not any(_admits_callables(alternative) for alternative in alternatives):
            return f"expected {self.text}; write {text}() for what {text[1:]} returns"
        builders = [typing.get_origin(option) is collections.abc.Callable for option in alternatives if option]
        if evaluated and all(builders) and not _admits_callables(_result(target)):
            return f"expected {self.text}, something to call; write {text.removesuffix('()')} without parentheses"
        return None


def checked_patterns(binding: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Regular expressions that a binding gives; UsageError for one that is none, or a string instead of a list."""
    if isinstance(patterns, str):
        raise UsageError(f"{binding} = {patterns!r}: must be a list of regular expressions, ({patterns!r},)")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{binding}: {pattern!r} is no regular expression: {error}") from None
    return tuple(patterns)


def check_value(binding: str, value: Any, holds: bool, must_be: str) -> None:
    """Raises UsageError, which says what the value must be, unless that `holds` of it."""
    if not holds:
        raise UsageError(f"{binding} = {value!r}: must be {must_be}")


def check_least(configurable: str, settings: Any, **least: int) -> None:
    """Raises UsageError where an attribute of the settings is less than the least that is given for it, or NaN."""
    for name, bound in least.items():
        value = getattr(settings, name)
        holds = False
        with contextlib.suppress(TypeError):  # of what is no number
            holds = bool(value >= bound)
        check_value(f"{configurable}.{name}", value, holds, f"{bound} or more")


def one_of(values: Iterable[Any]) -> str:
    """Words for "one of these", as `check_value` takes them."""
    return f"one of {', '.join(map(repr, values))}"


@functools.cache
def parameters(target: Any) -> tuple[dict[str, Parameter], bool]:
    """Parameters by name of a configurable function or class, and whether it takes any others (`**kwargs`)."""
    function = target
    if inspect.isclass(target):  # of which gin wraps the first `__init__` or `__new__` along the bases
        made_by = ((base, name) for base in inspect.getmro(target) for name in ("__init__", "__new__"))
        function = next(getattr(base, name) for base, name in made_by if name in vars(base))
    function = inspect.unwrap(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return {}, True
    found, is_open = {}, False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and not (name == "self" and inspect.isclass(target)):
            hint = _resolve(parameter.annotation, function)
            if hint is None:
                hint = types.NoneType
            written = parameter.annotation
            text = written if isinstance(written, str) else inspect.formatannotation(written)
            found[name] = Parameter(default=parameter.default, hint=hint, text=text.replace("typing.", ""))
    return found, is_open


def as_tuples(value: Any) -> Any:
    """The value with its lists, nested ones too, turned into tuples."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def kind(target: Any) -> tuple[str, str]:
    """Kind of a configurable, of which candidates for one place share it: what they return, else their module."""
    returns = getattr(target, "__annotations__", {}).get("return") if not inspect.isclass(target) else None
    if returns is None:
        return ("from", target.__module__)
    return ("returns", returns if isinstance(returns, str) else inspect.formatannotation(returns))


def _resolve(annotation: Any, function: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return _UNKNOWN
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(function, "__globals__", {}))
    except Exception:  # imported for type checkers only, or local to a function
        return _UNKNOWN


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, nested ones too; the hint itself if it is none."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in _alternatives(member)]
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(hint)[0])
    return [hint]


def _admits_callables(hint: Any) -> bool:
    """Whether something callable may be meant; yes wherever that cannot be told."""
    if hint is types.NoneType or hint is None:
        return False
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Literal, typing.Any):  # an object of a kind, such as a task; no class before Python 3.11
        return False
    if not inspect.isclass(origin) or origin in (object, type, collections.abc.Callable):
        return True
    return any("__call__" in vars(base) for base in inspect.getmro(origin))


def _result(target: Any) -> Any:
    if inspect.isclass(target):
        return target
    return _resolve(getattr(target, "__annotations__", {}).get("return", inspect.Parameter.empty), target)
