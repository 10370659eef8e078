"""The step with every large weight in parts: a replica has one, and those of a layer are put together when it is due.

That is ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054). A step whose optimizer is sharded reads and writes
each weight whole; its StableHLO is rewritten here, and no partitioner of XLA's takes part:

- a divided weight is an argument and a result of a part's shape: what cut the replica's shard out of the whole goes,
  and so does what put the new shards together;
- its uses in the forward pass get one all_gather of the part, those in the backward pass another, in 16 bits where the
  model casts the weight;
- each gather waits, by an optimization_barrier, for the features that its layer begins with, so that the compiler makes
  it neither early nor for both passes at once; and for the gradients that are known by then, so that those are parts;
- all_reduce and slice of a gradient are a reduce_scatter.

Where microbatches are added up in a loop, all of this is inside of it, and the sums are of parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.step_program.jax_parts import JaxParts
from launcher.step_program.pod_module import add_up, changes_nothing, one_group, operations, origin, owner_of, retype

_TOGETHER = 2**27  # bytes of wholes that are put together at once, for the first of them is due
_MOST_STEPS = 8  # operations on the way to a gradient that are made as early as can be
_MOST_LOOKED_AT = 64  # operations that say where a slice begins
_UNMOVED = ("stablehlo.custom_call", "stablehlo.rng_bit_generator")
_RESHAPES = ("stablehlo.reshape", "stablehlo.set_dimension_size")
_LEFT_OVER = {
    *_RESHAPES, "stablehlo.convert", "stablehlo.dynamic_slice",
    "stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.constant", "stablehlo.add",
}  # fmt: skip


def divide(
    jax: JaxParts,
    text: str,
    axes: Mapping[int, int],
    *,
    num_replicas: int,
    in_loop: bool = False,
    most_scattered: int | None = None,
) -> tuple[str, int]:
    """Rewrites a module whose weights are whole and whose first result is the loss.

    Args:
      axes: by the number of the argument that is a weight, the dimension that is divided.
      in_loop: whether gradients are those of microbatches, added up in a loop.
      most_scattered: replicas that may scatter in one step; None for any number.

    Raises:
      UnknownFormError: a weight is used in a form that is not known here.

    Returns:
      The module, and the bytes of the wholes that are put together for one microbatch.
    """
    how: dict[str, Any] = {"num_replicas": num_replicas, "in_loop": in_loop, "most_scattered": most_scattered}
    try:
        return _divided(jax, text, axes, **how)
    except Exception as error:  # MLIR's own, or one of a form that is not foreseen here
        places = sorted(axes)
        while len(places) > 1:
            half = places[: len(places) // 2]
            places = half if _fails(jax, text, {place: axes[place] for place in half}, **how) else places[len(half) :]
        raise UnknownFormError(places[0], f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


class UnknownFormError(Exception):
    """A weight, the argument of this number, is used in a form that cannot be rewritten; with what was found there."""

    def __init__(self, number: int, why: str):
        super().__init__(why)
        self.number = number


def _fails(*about: Any, **how: Any) -> bool:
    try:
        _divided(*about, **how)
    except Exception:
        return True
    return False


def _divided(
    jax: JaxParts, text: str, axes: Mapping[int, int], *, num_replicas: int, in_loop: bool, most_scattered: int | None
) -> tuple[str, int]:
    context = jax.new_context()
    with context, jax.ir.Location.unknown(context):
        module = jax.ir.Module.parse(text)
        main = jax.ir.SymbolTable(module.operation)["main"]
        gathered = _Rewriting(jax, main, num_replicas, stages(num_replicas, most_scattered)).run(axes, in_loop)
        module.operation.verify()
        return module.operation.get_asm(enable_debug_info=True), gathered


def stages(count: int, most: int | None) -> list[int]:
    """Sizes of groups that scatter one after another, the replicas that are far apart first."""
    near = 8
    return [count] if most is None or count <= most or count % near else [*stages(count // near, most), near]


@dataclasses.dataclass(frozen=True)
class _Use:
    """An operand that is a weight, or the weight cast to `dtype`; or a lookup in a weight, whose rows are cast."""

    number: int  # the weight's among main's arguments
    axis: int  # the dimension that is divided
    weight: Any  # the part
    operation: Any
    place: int
    dtype: str | None = None
    is_lookup: bool = False


class _Scope:
    """A block in which weights are used, main's or a loop's body, and its operations as they stood."""

    def __init__(self, block: Any):
        self.block = block
        self.operations = [one.operation for one in block.operations]
        self._numbers = {_key(one): number for number, one in enumerate(self.operations)}
        self.moved: dict[int, int] = {}  # by the number of an operation, the place behind which it stands now
        self.last: dict[int, Any] = {}  # by the place, the last that was moved there

    @property
    def returned(self) -> Any:
        return self.operations[-1]

    def around(self, operation: Any) -> Any:
        """The operation of this block in which one stands; None outside of it."""
        while operation is not None and operation.block != self.block:
            operation = getattr(operation.parent, "operation", None)
        return operation

    def number(self, operation: Any) -> int:
        """Where the one around an operation stood at first."""
        return self._numbers[_key(self.around(operation))]

    def place(self, operation: Any) -> int:
        number = self.number(operation)
        return self.moved.get(number, number)

    def in_order(self, runs: Sequence[Sequence[_Use]]) -> list[Sequence[_Use]]:
        """Uses by where they stand now, and runs of them by their first; several may have been moved to one place."""

        def order(one: Any, other: Any) -> int:
            first, second = self.around(one.operation), self.around(other.operation)
            return 0 if first == second else -1 if first.is_before_in_block(second) else 1

        by_place = functools.cmp_to_key(order)
        return sorted((sorted(run, key=by_place) for run in runs), key=lambda run: by_place(run[0]))


class _Rewriting:
    def __init__(self, jax: JaxParts, main: Any, num_replicas: int, sizes: Sequence[int]):
        self.jax, self.ir, self.function, self.num_replicas = jax, jax.ir, main, num_replicas
        numbers = np.arange(num_replicas)
        self.groups = [
            self._groups(np.moveaxis(numbers.reshape(sizes), place, -1).reshape(-1, size))
            for place, size in enumerate(sizes)
        ]
        self.all = one_group(jax, num_replicas)
        self.main = self.body = _Scope(main.regions[0].blocks[0])  # body: the block with the passes
        self.loop: Any = None  # over microbatches, whose body it is, if there is one
        self.scattered: list[tuple[int, Any]] = []  # gradients' parts, each behind a place of the body

    def run(self, axes: Mapping[int, int], in_loop: bool) -> int:
        gradients = list(self._gradients())  # none of an evaluation, which is one pass
        if in_loop and gradients:
            self.loop = owner_of(origin(gradients[0][0].operands[0], "stablehlo.convert"))
            self.body = _Scope(self.loop.regions[1].blocks[0])
        forward = self._forward() if gradients else set()
        uses = [use for number, axis in axes.items() for use in self._take_part(number, axis)]
        for gradient in gradients:
            self._scatter(*gradient)
        gathered, by_scope = 0, {self.body: list[_Use](), self.main: list[_Use]()}
        for use in uses:
            by_scope[self.main if self.body.around(use.operation) is None else self.body].append(use)
        for scope, found in by_scope.items():
            gathered += self._gather(scope, found, forward)
            for outer in reversed(list(scope.block.operations)):
                inside = operations(self.jax, outer, *_RESHAPES) if len(outer.regions) else []  # of a conditional
                for one in (*reversed(inside), outer):
                    if one.name in _LEFT_OVER and not any(_uses(result) for result in one.results):
                        one.operation.erase()
        retype(self.jax, self.function, [one.type for one in self.main.returned.operands])
        return gathered

    # ---------------------------------------------------------------------------------------------------- what is there

    def _gradients(self) -> Iterator[tuple[Any, list[Any], int]]:
        """Each reduction of which a replica uses its own part alone: it, the slices, and the dimension."""
        for one in self.main.operations:
            own, others = _own_slices(one.results[0]) if one.name == "stablehlo.all_reduce" else ([], [])
            if own and not others:
                pair = zip(_shape(one.results[0]), _shape(own[0].results[0]), strict=True)
                yield one, own, next(axis for axis, (whole, part) in enumerate(pair) if whole != part)

    def _forward(self) -> set[int]:
        """The numbers of the operations of the passes' block that the loss depends on."""
        of_all = owner_of(
            origin(self.main.returned.operands[0], "stablehlo.slice", "stablehlo.reshape")
        )  # the scalars that a step reports
        if of_all is None or of_all.name != "stablehlo.concatenate":
            raise RuntimeError(f"the loss is not among the scalars of the step, but made by {of_all}")
        found = self._needed([of_all.operands[0]], self.main)
        if self.loop is None:
            return found
        places = [
            place
            for place, one in enumerate(self.loop.results)
            if any(self.main.number(user) in found for user, _ in _uses(one))
        ]
        return self._needed([self.body.returned.operands[place] for place in places], self.body)

    def _needed(self, values: list[Any], scope: _Scope) -> set[int]:
        found: set[int] = set()
        while values:
            one = owner_of(values.pop())
            if one is None or one.block != scope.block or self._is_loop(one):
                continue
            if (number := scope.number(one)) not in found:
                found.add(number)
                values += [value for each in operations(self.jax, one) for value in each.operands]
        return found

    def _is_loop(self, one: Any) -> bool:
        return self.loop is not None and one is not None and one == self.loop

    # ------------------------------------------------------------------------------------------------- weights as parts

    def _take_part(self, number: int, axis: int) -> list[_Use]:
        """Has a weight, and its new value, be a part; returns its other uses."""
        weight, returned = self.main.block.arguments[number], self.main.returned
        part = [size // self.num_replicas if at == axis else size for at, size in enumerate(_shape(weight))]
        attributes = self.function.attributes
        about = (
            self.ir.DictAttr(self.ir.ArrayAttr(attributes["arg_attrs"])[number]) if "arg_attrs" in attributes else {}
        )
        if "tf.aliasing_output" in about:
            result = self.ir.IntegerAttr(about["tf.aliasing_output"]).value
            whole = origin(returned.operands[result])
            own, others = _own_slices(whole)
            if whole.owner.name != "stablehlo.all_gather" or [user for user, _ in others] != [returned]:
                raise RuntimeError(f"the new value of argument {number} is not put together from shards alone")
            new = whole.owner.operands[0]
            while _shape(new) != part:
                new = new.owner.operands[0]
            returned.operands[result] = new
            for one in own:
                one.results[0].replace_all_uses_with(new)
        own, others = _own_slices(weight)
        weight.set_type(self._type(weight, part))
        for one in own:
            one.results[0].replace_all_uses_with(weight)
        uses = [(weight, user, place) for user, place in others if not self._is_loop(user)]
        for place in (place for user, place in others if self._is_loop(user)):
            uses += [(self.body.block.arguments[place], *use) for use in self._carry(place, weight)]
        return [found for use in uses for found in _as_used(number, axis, *use)]

    def _carry(self, place: int, first: Any) -> list[tuple[Any, int]]:
        """Has a place of the loop's state be of a value's type, and begin with it; returns its uses in the body."""
        carried, returned = self.body.block.arguments[place], self.body.returned
        uses = [(user, at) for user, at in _uses(carried) if user != returned]
        if origin(returned.operands[place]) == carried:
            returned.operands[place] = carried
        self.loop.operands[place] = first
        for value in (carried, self.loop.regions[0].blocks[0].arguments[place], self.loop.results[place]):
            value.set_type(first.type)
        for use in self.loop.regions[0].blocks[0].arguments[place].uses:
            if use.owner.name == "func.call":  # which has the whole state and looks at the number of turns
                name = self.ir.FlatSymbolRefAttr(use.owner.attributes["callee"]).value
                function = self.ir.SymbolTable(self.function.operation.parent)[name]
                function.regions[0].blocks[0].arguments[use.operand_number].set_type(first.type)
                retype(self.jax, function, list(function.type.results))
        return uses

    # ------------------------------------------------------------------------------------------------- gradients' parts

    def _scatter(self, reduction: Any, slices: Sequence[Any], axis: int) -> None:
        """Gives each replica its part alone of a gradient, as soon as this is known; in the loop, of each turn's."""
        value, scope, total = reduction.operands[0], self.main, origin(reduction.operands[0], "stablehlo.convert")
        sent, place = _dtype(value), None
        if self._is_loop(owner_of(total)):
            scope, place = self.body, self.ir.OpResult(total).result_number
            added = owner_of(origin(scope.returned.operands[place]))
            carried = scope.block.arguments[place]
            (value,) = [term for term in added.operands if origin(term) != carried]
        behind = self._early(value, scope)
        with self.ir.InsertionPoint.after(owner_of(value)), reduction.location:
            part = self._reduce_scatter(self._cast(value, sent), axis)
        if scope is self.body:
            self.scattered.append((behind, part))
        if place is not None:
            with self.ir.InsertionPoint(self.loop), reduction.location:
                type_ = self._type(value, _shape(part))
                zero = self.ir.DenseElementsAttr.get_splat(type_, self.ir.FloatAttr.get(type_.element_type, 0.0))
                self._carry(place, self.jax.stablehlo.constant(zero))
            with self.ir.InsertionPoint(added), reduction.location:
                scope.returned.operands[place] = self.jax.stablehlo.add(carried, self._cast(part, _dtype(value)))
            with self.ir.InsertionPoint(reduction), reduction.location:
                part = self._cast(self.loop.results[place], sent)
        for one in slices:
            one.results[0].replace_all_uses_with(part)

    def _early(self, value: Any, scope: _Scope, steps: int = _MOST_STEPS) -> int:
        """Moves what a value is made by to behind the last of what that needs; returns the place it stands behind.

        -1 for what needs nothing but arguments and constants.
        """
        one = owner_of(value)
        if one is None:
            return -1
        number = scope.number(one)
        if number in scope.moved or len(one.regions) or one.name in _UNMOVED or not steps:
            return scope.place(one)
        behind = max((self._early(each, scope, steps - 1) for each in one.operands), default=-1)
        if 0 <= behind < number:
            self._move(one, behind, scope)
        return behind if steps < _MOST_STEPS else scope.place(one)

    def _move(self, one: Any, behind: int, scope: _Scope) -> None:
        for owner in map(owner_of, one.operands):
            if owner is not None and scope.place(owner) > behind:
                self._move(owner, behind, scope)
        last = scope.last.get(behind, scope.operations[behind])
        one.move_after(last)
        scope.last[behind], scope.moved[scope.number(one)] = one, behind

    def _reduce_scatter(self, value: Any, axis: int) -> Any:
        for groups in self.groups:
            shape = _shape(value)
            shape[axis] //= self.ir.DenseElementsAttr(groups).type.shape[1]
            int64 = self.ir.IntegerType.get_signless(64)
            attributes = {"scatter_dimension": self.ir.IntegerAttr.get(int64, axis), "replica_groups": groups}
            operation = self.ir.Operation.create(
                "stablehlo.reduce_scatter", [self._type(value, shape)], [value], attributes, regions=1
            )
            add_up(self.jax, operation)
            value = operation.results[0]
        return value

    # -------------------------------------------------------------------------------------------------- wholes when due

    def _gather(self, scope: _Scope, uses: Sequence[_Use], forward: set[int]) -> int:
        """Has the uses of weights in a block be of wholes, put together once in each pass; returns their bytes."""
        wanted: dict[tuple[int, bool], list[_Use]] = {}
        for use in uses:
            wanted.setdefault((use.number, scope.number(use.operation) in forward), []).append(use)
        gathered, together, waits_for, last, in_forward = 0, 0, None, None, None
        for found in scope.in_order([*wanted.values()]):
            first, before = found[0], scope.around(found[0].operation)
            is_forward = scope.number(first.operation) in forward
            # Of a table that is looked up and multiplied by in other dtypes, one whole for both.
            dtype = first.dtype if len({use.dtype for use in found}) == 1 else None
            shape = _shape(first.weight)
            shape[first.axis] *= self.num_replicas
            with self.ir.InsertionPoint(before), before.location:
                part = self._cast(first.weight, dtype)
                size = math.prod(shape) * _bits(_dtype(part)) // 8
                if is_forward != in_forward or together + size > _TOGETHER:
                    waits_for, together = _features(first, scope) or last, 0
                if waits_for is not None:
                    part = self._wait(part, waits_for, scope, before)
                whole = self.jax.stablehlo.all_gather([self._type(part, shape)], [part], first.axis, self.all)
            for use in found:
                self._use(use, whole, dtype)
            gathered, together, in_forward, last = gathered + size, together + size, is_forward, before.results[0]
        return gathered

    def _wait(self, part: Any, features: Any, scope: _Scope, before: Any) -> Any:
        """The part, which is there when the features are, and the parts of gradients that are known by then."""
        known = [one for at, one in self.scattered if scope is self.body and at < scope.place(before)]
        self.scattered = [pair for pair in self.scattered if pair[1] not in known]
        values = [part, features, *known]
        barrier = self.ir.Operation.create("stablehlo.optimization_barrier", [one.type for one in values], values)
        for old, new in zip(known, list(barrier.results)[2:], strict=True):
            users = [use.owner.operation for use in old.uses]
            before = [user for user in users if scope.around(user).is_before_in_block(barrier)]
            old.replace_all_uses_except(new, [*before, barrier])
        return barrier.results[0]

    def _use(self, use: _Use, whole: Any, dtype: str | None) -> None:
        if use.dtype == dtype and use.is_lookup:
            rows = use.operation.results[0]
            casts = [user for user, _ in _uses(rows)]
            rows.set_type(self._type(whole, _shape(rows)))
            for cast in casts:
                with self.ir.InsertionPoint(cast), cast.location:
                    cast.results[0].replace_all_uses_with(self.jax.stablehlo.reshape(cast.results[0].type, rows))
        elif use.dtype != dtype and not use.is_lookup:
            with self.ir.InsertionPoint(use.operation), use.operation.location:
                whole = self._cast(whole, use.dtype)
        use.operation.operands[use.place] = whole

    def _cast(self, value: Any, dtype: str | None) -> Any:
        if dtype is None or str(value.type.element_type) == dtype:
            return value
        return self.jax.stablehlo.convert(self.ir.RankedTensorType.get(_shape(value), self.ir.Type.parse(dtype)), value)

    def _type(self, like: Any, shape: Sequence[int]) -> Any:
        return self.ir.RankedTensorType.get(list(shape), like.type.element_type)

    def _groups(self, replicas: np.ndarray) -> Any:
        return self.ir.DenseElementsAttr.get(np.ascontiguousarray(replicas, np.int64))


def _key(operation: Any) -> Any:
    """What an operation is known by: its own hash changes with its operands."""
    return operation.results[0] if len(operation.results) else operation.name


def _shape(value: Any) -> list[int]:
    return list(value.type.shape)


def _dtype(value: Any) -> str:
    return str(value.type.element_type)


def _bits(dtype: str) -> int:
    return int(re.findall(r"\d+", dtype)[0])  # of f8E4M3FN, too


def _uses(value: Any) -> list[tuple[Any, int]]:
    """The operations that use a value, by which operand, also through operations that change nothing."""
    found: list[tuple[Any, int]] = []
    for use in value.uses:
        one = use.owner.operation
        passes = changes_nothing(one) and use.operand_number == 0
        found += _uses(one.results[0]) if passes else [(one, use.operand_number)]
    return found


def _own_slices(value: Any) -> tuple[list[Any], list[tuple[Any, int]]]:
    """Of a value's uses the slices that begin where the replica says, and the others."""
    uses = _uses(value)
    own = [one for one, place in uses if one.name == "stablehlo.dynamic_slice" and place == 0 and _is_own(one)]
    return own, [(one, place) for one, place in uses if one not in own]


def _is_own(cut: Any) -> bool:
    values = list(cut.operands)[1:]
    for _ in range(_MOST_LOOKED_AT):
        one = owner_of(values.pop()) if values else None
        if one is not None and one.name == "stablehlo.replica_id":
            return True
        values += list(one.operands) if one is not None else []
    return False


def _as_used(number: int, axis: int, weight: Any, user: Any, place: int) -> list[_Use]:
    """A use of a weight, or those of the narrower one that it is cast to."""
    casts = [user] if user.name == "stablehlo.convert" else []
    is_lookup = user.name == "stablehlo.gather" and place == 0
    if is_lookup:
        casts = [one if one.name == "stablehlo.convert" else None for one, _ in _uses(user.results[0])]
    dtypes = {None if one is None else _dtype(one.results[0]) for one in casts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype is None or _bits(dtype) >= _bits(_dtype(weight)):
        return [_Use(number, axis, weight, user, place)]
    if is_lookup:
        return [_Use(number, axis, weight, user, place, dtype, True)]
    return [_Use(number, axis, weight, one, at, dtype) for one, at in _uses(user.results[0])]


def _features(first: _Use, scope: _Scope) -> Any:
    """What the first use of a weight is with, if it is there before; None where that cannot be said."""
    before = one = scope.around(first.operation)
    for _ in range(_MOST_STEPS):
        for value in one.operands:
            owner = owner_of(value)
            by_weight = owner is not None and [*owner.operands] == [first.weight]
            if owner is None or by_weight or owner.name == "stablehlo.constant" or not value.type.shape:
                continue
            if one is before or owner.is_before_in_block(before):
                return value
        users = {scope.around(user) for result in one.results for user, _ in _uses(result)}
        if len(users) != 1:
            return None
        (one,) = users
    return None
