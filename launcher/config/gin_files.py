"""gin files: where they are found and the bindings and imports that stand in them, not yet looked up."""

import ast
import contextlib
import dataclasses
import functools
import io
import os
import re
import tokenize
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import launcher
from launcher.config import old_bindings
from launcher.config.gin_private import internals
from launcher.errors import UsageError, advice

RECIPES = Path(launcher.__path__[-1]).resolve() / "gin_configs"  # beside launcher/ in a checkout, in it when installed

_FORM = "expected NAME.PARAMETER=VALUE or MACRO=VALUE, such as --gin_param 'train.steps = 30'"
_UNREADABLE = "cannot read the value"


def search_path() -> tuple[str, ...]:
    """Folders in which gin files and their includes are looked for, in this order."""
    return (os.getcwd(), str(RECIPES))


def find_file(name: str, *beside: str) -> str:
    """Finds a gin file by its name, absolute or relative to a folder of `search_path()`, then to those `beside` it.

    The error has the nearest name.
    """
    folders = *search_path(), *beside
    for folder in folders:
        path = os.path.join(folder, os.path.expanduser(name))
        if os.path.isfile(path):
            relative = os.path.relpath(path)
            return os.path.abspath(path) if relative.startswith(os.pardir) else relative
    known = {file.name for folder in folders for file in Path(folder).glob("*.gin")}
    known |= {file.relative_to(RECIPES).as_posix() for file in RECIPES.rglob("*.gin")}
    where = "" if os.path.isabs(name) else f" in {' or '.join(folders)}"
    raise UsageError(f"gin file {name!r} not found{where}{advice(name, known)}")


def recipes() -> list[tuple[str, str]]:
    """Name and one-line purpose (its first comment line) of every recipe that comes with Launcher."""
    found = []
    for file in sorted(RECIPES.glob("*.gin")):
        comments = (line.lstrip("# ").strip() for line in file.read_text("utf-8").splitlines() if line.startswith("#"))
        found.append((file.name, next(comments, "")))
    return found


@dataclasses.dataclass(frozen=True)
class Name:
    """`@scope/name`, `@scope/name()` or `%name` as it stands in a value."""

    sign: str
    scoped: str
    evaluate: bool = False

    @property
    def selector(self) -> str:
        return self.scoped.rsplit("/", 1)[-1]

    def __repr__(self) -> str:
        return f"{self.sign}{self.scoped}{'()' if self.evaluate else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binding:
    """One `scope/selector.arg = value`; a macro's has no arg.

    Attributes:
      where: file and line, or "--gin_param".
      order: its place among all statements of one load.
      was: the name that it has there, if that is an old one.
    """

    scope: str
    selector: str
    arg: str
    value: Any
    where: str
    order: int = 0
    was: str = ""

    @property
    def source(self) -> str:
        """File that it stands in, or "--gin_param"."""
        return self.where.rpartition(" line ")[0] or self.where

    @property
    def name(self) -> str:
        return "/".join(filter(None, [self.scope, self.selector])) + (f".{self.arg}" if self.arg else "")

    def __str__(self) -> str:
        return f"{self.where}: {self.name} = {self.value!r}"


@dataclasses.dataclass(frozen=True)
class Import:
    """One `import module` or `from package import module`.

    `folder` is that of the gin file, where modules are looked for, too; "" for a recipe of Launcher's. `statement` is
    gin's own; None of what stands in no file.
    """

    module: str
    text: str
    where: str
    folder: str
    statement: Any


def replace_names(value: Any, replace: Callable[[Name], Any]) -> Any:
    """A copy of a bound value with every name in it replaced."""
    if isinstance(value, Name):
        return replace(value)
    if isinstance(value, dict):
        return {replace_names(key, replace): replace_names(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_names(item, replace) for item in value)
    return value


def names_in(value: Any, sign: str = "@%") -> list[Name]:
    """The names of these signs that stand anywhere in a bound value."""
    found: list[Name] = []
    replace_names(value, found.append)
    return [name for name in found if name.sign in sign]


def read_file(path: str, *, opened: list[str], including: tuple[str, ...] = ()) -> list[Binding | Import]:
    """Statements of a file that `find_file` gave and, in their places, of the files it includes.

    Args:
      opened: receives the path of every file read.
      including: files that this one is included from.
    """
    if path in including:
        raise UsageError(f"{path} includes itself: {' -> '.join([*including, path])}")
    opened.append(path)
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"gin file {path} cannot be read: {error}") from None
    parser = internals().parser
    folder = os.path.dirname(os.path.abspath(path))
    folder = "" if Path(folder).is_relative_to(RECIPES) else folder
    statements: list[Binding | Import] = []
    for found in _parse(text, path):
        where = f"{path} line {found.location.line_num}"
        if isinstance(found, parser.BindingStatement):
            statements += [] if _is_gone(found) else [_as_binding(found, where)]
        elif isinstance(found, parser.ImportStatement):
            statements.append(Import(found.module, found.format(), where, folder, found))
        elif isinstance(found, parser.IncludeStatement):
            try:
                included = find_file(found.filename, os.path.dirname(os.path.abspath(path)))
            except UsageError as error:
                raise UsageError(f"{where}: include: {error}") from None
            statements += read_file(included, opened=opened, including=(*including, path))
    return statements


def read_param(param: str) -> Binding:
    """The binding in one --gin_param; UsageError where it is not one."""
    try:
        found = list(_parse(param, None))
    except UsageError as error:
        form = "" if str(error).startswith(_UNREADABLE) else f"; {_FORM}"
        raise UsageError(f"--gin_param {param!r}: {error}{form}") from None
    if len(found) != 1 or not isinstance(found[0], internals().parser.BindingStatement):
        raise UsageError(f"--gin_param {param!r} is not one binding; {_FORM}")
    return _as_binding(found[0], "--gin_param")


def values(config: str | Path) -> dict[str, Any]:
    """Values that a text or a file binds, by the bindings' names, up to what cannot be read."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, UsageError):
        text = config.read_text("utf-8") if isinstance(config, Path) else config
        for one in _parse(text, None):
            if isinstance(one, internals().parser.BindingStatement) and not _is_gone(one):
                binding = _as_binding(one, "")
                found[binding.name] = binding.value
    return found


def plain_value(files: Sequence[str], params: Sequence[str], parameter: str) -> Any:
    """The value that gin files, a program and bindings give a parameter, such as "train.engine", as its text says it.

    Nothing is imported or called: a supervisor, or who writes a manifest, may not have what the recipe needs, or not
    even the recipe. None where nothing can be told. A program says it in its first call of `launcher.fit`.
    """
    found: dict[str, Any] = {}
    for path in files:
        if path.endswith(".py"):
            found.setdefault(parameter, _given_to_fit(Path(path), parameter.rpartition(".")[2]))
            continue
        with contextlib.suppress(UsageError):
            read = read_file(find_file(path), opened=[])
            found |= {one.name: one.value for one in read if isinstance(one, Binding)}
    for param in params:
        with contextlib.suppress(UsageError):
            one = read_param(param)
            found[one.name] = one.value
    value = found.get(parameter)
    return found.get(value.scoped) if isinstance(value, Name) and value.sign == "%" else value


def _given_to_fit(program: Path, argument: str) -> Any:
    """The literal that a Python program gives the first call of a function named `fit` with such an argument."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for one in ast.walk(ast.parse(program.read_text("utf-8"))):
            if isinstance(one, ast.Call) and ast.unparse(one.func).rpartition(".")[2] == "fit":
                for keyword in one.keywords:
                    if keyword.arg == argument and isinstance(keyword.value, ast.Constant):
                        return keyword.value.value
    return None


def _is_gone(found: Any) -> bool:
    return old_bindings.is_gone(f"{found.selector}.{found.arg_name}", found.value)


def _as_binding(found: Any, where: str) -> Binding:
    told = f"{found.selector}.{found.arg_name}"
    name, value = old_bindings.as_now(told, found.value)
    selector, _, arg = name.rpartition(".")
    was = told if name != told else ""
    return Binding(scope=found.scope, selector=selector, arg=arg, value=value, where=where, was=was)


# What gin's parser calls for `@name` and `%name`.
_NAMES = types.SimpleNamespace(configurable_reference=functools.partial(Name, "@"), macro=functools.partial(Name, "%"))


def _parse(text: str, path: str | None) -> Iterator[Any]:
    """gin's statements, with names left as `Name`."""
    try:
        yield from internals().parser.ConfigParser(io.StringIO(text), _NAMES)
    except SyntaxError as error:
        problem = error.msg.rstrip(".").replace(".  Got ", ", got ")
        token = re.search(r"Failed to parse token '(.*)'", error.msg, re.DOTALL)
        if token:
            problem = f"{_UNREADABLE} {token[1]}: a string needs quotes, a reference begins with @, a macro with %"
        line = f": {error.text.strip()}" if path and error.text and error.text.strip() else ""
        raise UsageError(f"{_at(path, error.lineno)}{problem}{line}") from None
    except tokenize.TokenError as error:
        problem, (line_number, _) = error.args
        raise UsageError(f"{_at(path, line_number)}{problem}; is a bracket or a quote left open?") from None
    except RecursionError:
        raise UsageError(f"{f'{path}: ' if path else ''}brackets within brackets, too many to be read") from None


def defines(path: Path, name: str) -> bool:
    """Whether a Python file has a class or a function of this name at its outermost level."""
    try:
        text = path.read_text("utf-8")
        statements = ast.parse(text).body if name in text else []
    except (OSError, SyntaxError, ValueError):
        return False
    kinds = (ast.ClassDef, ast.FunctionDef)
    return any(isinstance(statement, kinds) and statement.name == name for statement in statements)


def _at(path: str | None, line_number: int | None) -> str:
    return f"{path} line {line_number}: " if path else ""
