"""The HLO of a traced step made a StableHLO module for all replicas of a pod."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.models.transformer.cudnn_attention import TARGET as ATTENTION
from launcher.step_program import tpu_random
from launcher.step_program.jax_parts import JaxParts
from launcher.step_program.pod_replica import ALL_GATHER, ALL_REDUCE, REPLICA_ID

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TensorType = tuple[tuple[int, ...], str]
"""Shape, and dtype by NumPy's name or, for bfloat16, ml_dtypes'."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodModule:
    """A module whose only public function is "main"."""

    text: str  # MLIR, with locations
    arguments: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    kept: tuple[int, ...]  # which of the traced function's results these are


def convert(
    jax: JaxParts,
    hlo: bytes,
    *,
    num_replicas: int,
    num_results: int,
    updates: Mapping[int, int],
    philox: frozenset[str] | None = None,
) -> PodModule:
    """Makes one program for all replicas of a serialised HloModuleProto.

    Marked places get their collectives. A result that hands a parameter on as it came is left out, and any beyond
    `num_results`. A result that is a parameter's new value takes its memory.

    Args:
      updates: result to the parameter whose new value it is.
      philox: for a TPU, the operations that use Philox there as well; None for other devices, where all do.
    """
    context = jax.new_context()
    with context, jax.ir.Location.unknown(context):
        module = jax.ir.Module.parse(jax.mlir.hlo_to_stablehlo(hlo))
        _fold_copies(jax, module)
        _insert_collectives(jax, module, num_replicas)
        _lay_out(jax, module)
        if philox is not None:
            tpu_random.use_default_generator(jax, operations(jax, module, "stablehlo.rng_bit_generator"), philox)
        _drop_unused_functions(jax, module)
        main = jax.ir.SymbolTable(module.operation)["main"]
        kept = _drop_results(jax, main, num_results, updates)
        _alias(jax, main, {updates[old]: new for new, old in enumerate(kept) if old in updates})
        for attribute in list(module.operation.attributes):
            # Said of the results as they were.
            if attribute.startswith("mhlo."):
                del module.operation.attributes[attribute]
        int32 = jax.ir.IntegerType.get_signless(32)
        module.operation.attributes["sym_name"] = jax.ir.StringAttr.get("train_step")
        module.operation.attributes["mhlo.num_replicas"] = jax.ir.IntegerAttr.get(int32, num_replicas)
        module.operation.attributes["mhlo.num_partitions"] = jax.ir.IntegerAttr.get(int32, 1)
        module.operation.verify()
        return PodModule(
            text=module.operation.get_asm(enable_debug_info=True),
            arguments=tuple(_tensor_type(jax, part) for part in main.type.inputs),
            results=tuple(_tensor_type(jax, part) for part in main.type.results),
            kept=kept,
        )


def of_partitions(jax: JaxParts, text: str, *, scatters: bool = True) -> bytes:
    """The same program, in StableHLO's portable form, for one replica of as many partitions, as a mesh of JAX has them.

    Collectives are over the devices' numbers, and what was a replica's number is a partition's. Where the devices do
    not scatter, each sums the whole and takes its part.
    """
    with jax.new_context():
        module = jax.ir.Module.parse(text)
        for one in [] if scatters else operations(jax, module, "stablehlo.reduce_scatter"):
            with jax.ir.InsertionPoint(one), one.location:
                one.results[0].replace_all_uses_with(_sum_and_slice(jax, one))
            one.erase()
        channel = jax.ir.Attribute.parse("#stablehlo.channel_handle<handle = 1, type = 1>")
        for collective in operations(jax, module, *(f"stablehlo.{name}" for name in _COLLECTIVES)):
            collective.attributes["channel_handle"] = channel
            collective.attributes["use_global_device_ids"] = jax.ir.UnitAttr.get()
        for number in operations(jax, module, "stablehlo.replica_id"):
            with jax.ir.InsertionPoint(number), number.location:
                number.results[0].replace_all_uses_with(jax.stablehlo.partition_id())
            number.erase()
        main = jax.ir.SymbolTable(module.operation)["main"]
        if "arg_attrs" in main.attributes:
            del main.attributes["arg_attrs"]  # whose memory a result takes is said by who calls it
        for attribute in ("mhlo.num_replicas", "mhlo.num_partitions"):
            del module.operation.attributes[attribute]
        return jax.mlir.serialize_portable_artifact(module, jax.stablehlo.get_current_version())


def operations(jax: JaxParts, module: Any, *names: str) -> list[Any]:
    """Those of these names in a module or an operation, itself included; without names, all."""
    found = []

    def visit(operation: Any) -> Any:
        if not names or operation.name in names:
            found.append(operation)
        return jax.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def made_of_unknown_size(jax: JaxParts, text: str, num_replicas: int) -> str | None:
    """The location of the first operation whose result has a size that only values tell; None where there is none.

    One device takes such inner sizes, which have bounds; of several Shardy, which divides a program, takes none.
    """
    unknown = re.compile(r"tensor<\?" if num_replicas == 1 else r"tensor<[\dx]*\?")
    if not unknown.search(text):
        return None
    with jax.new_context():
        module = jax.ir.Module.parse(text)
        for one in operations(jax, module):
            if any(unknown.search(str(result.type)) for result in one.results):
                return str(one.location)
    return None


def _fold_copies(jax: JaxParts, module: Any) -> None:
    """Takes out HLO's copies, for which StableHLO has no operation."""
    for copy in operations(jax, module, "mhlo.copy"):
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.erase()


def _insert_collectives(jax: JaxParts, module: Any, num_replicas: int) -> None:
    for call in operations(jax, module, "stablehlo.custom_call"):
        target = jax.ir.StringAttr(call.attributes["call_target_name"]).value
        if target not in (ALL_REDUCE, REPLICA_ID) and not target.startswith(ALL_GATHER):
            continue
        with jax.ir.InsertionPoint(call), call.location:
            if target == ALL_REDUCE:
                value = _all_reduce_sum(jax, call.operands[0], num_replicas)
            elif target.startswith(ALL_GATHER):
                axis = int(target.removeprefix(ALL_GATHER))
                value = jax.stablehlo.all_gather(
                    [call.results[0].type], [call.operands[0]], axis, one_group(jax, num_replicas)
                )
            else:
                value = jax.stablehlo.convert(call.results[0].type, jax.stablehlo.replica_id())
        call.results[0].replace_all_uses_with(value)
        call.erase()


def _lay_out(jax: JaxParts, module: Any) -> None:
    """Has cuDNN's attention write [batch, heads, length, width] as [batch, length, heads, width], as it is read.

    TensorFlow knows no layouts; without this, each output would be copied. Tilings that are none, which JAX 0.11 writes
    down, are left out: a compiler that is older than them refuses any call with them.
    """
    for call in operations(jax, module, "stablehlo.custom_call"):
        for tilings in {"operand_tilings", "result_tilings"} & set(call.attributes):
            if not re.search(r"\d", str(call.attributes[tilings])):
                del call.attributes[tilings]
        if jax.ir.StringAttr(call.attributes["call_target_name"]).value.startswith(ATTENTION):
            layouts = str(call.attributes["result_layouts"]).replace("3, 2, 1, 0", "3, 1, 2, 0")
            call.attributes["result_layouts"] = jax.ir.Attribute.parse(layouts)
            del call.attributes["xla_shape"]  # says the layouts as they were


def one_group(jax: JaxParts, num_replicas: int) -> Any:
    return jax.ir.DenseElementsAttr.get(np.arange(num_replicas, dtype=np.int64)[np.newaxis])


def _all_reduce_sum(jax: JaxParts, operand: Any, num_replicas: int) -> Any:
    reduce = jax.stablehlo.AllReduceOp([operand.type], [operand], one_group(jax, num_replicas))
    add_up(jax, reduce)
    return reduce.results[0]


def _sum_and_slice(jax: JaxParts, scatter: Any) -> Any:
    """What a reduce_scatter over all replicas gives."""
    groups = jax.ir.DenseElementsAttr(scatter.attributes["replica_groups"])
    axis, shape = jax.ir.IntegerAttr(scatter.attributes["scatter_dimension"]).value, scatter.results[0].type.shape
    int64 = jax.ir.RankedTensorType.get([], jax.ir.IntegerType.get_signless(64))

    def number(value: int) -> Any:
        return jax.stablehlo.constant(jax.ir.DenseElementsAttr.get(np.array(value, np.int64), type=int64.element_type))

    replica = jax.stablehlo.convert(int64, jax.stablehlo.replica_id())
    begin = jax.stablehlo.multiply(replica, number(shape[axis]))
    starts = [begin if place == axis else number(0) for place in range(len(shape))]
    whole = _all_reduce_sum(jax, scatter.operands[0], groups.type.shape[1])
    return jax.stablehlo.dynamic_slice(whole, starts, jax.ir.DenseI64ArrayAttr.get(list(shape)))


def add_up(jax: JaxParts, collective: Any) -> None:
    """Fills the region that says what a collective does with two numbers."""
    scalar = jax.ir.RankedTensorType.get([], collective.operands[0].type.element_type)
    with jax.ir.InsertionPoint(collective.regions[0].blocks.append(scalar, scalar)) as at:
        jax.stablehlo.return_([jax.stablehlo.add(*at.block.arguments)])


def _drop_unused_functions(jax: JaxParts, module: Any) -> None:
    """Branches and loop bodies stand in their operations; the converter leaves them as functions, too."""
    while True:
        callers = operations(jax, module, "func.call", "stablehlo.custom_call", "stablehlo.composite")
        named = [
            str(operation.attributes[key])
            for operation in callers
            for key in ("callee", "called_computations", "decomposition")
            if key in operation.attributes
        ]
        called = {name for text in named for name in re.findall(r"@([\w.$-]+)", text)}
        unused = [
            function
            for function in operations(jax, module, "func.func")
            if (name := jax.ir.StringAttr(function.attributes["sym_name"]).value) != "main" and name not in called
        ]
        for function in unused:
            function.erase()
        if not unused:
            return


def _drop_results(jax: JaxParts, main: Any, num_results: int, updates: Mapping[int, int]) -> tuple[int, ...]:
    block = main.regions[0].blocks[0]
    terminator = list(block.operations)[-1]
    values = list(terminator.operands)[:num_results]
    kept = tuple(
        index
        for index, value in enumerate(values)
        if index not in updates or origin(value) != block.arguments[updates[index]]
    )
    with jax.ir.InsertionPoint(terminator):
        jax.ir.Operation.create("func.return", operands=[values[index] for index in kept])
    terminator.erase()
    retype(jax, main, [values[index].type for index in kept])
    if "res_attrs" in main.attributes:
        del main.attributes["res_attrs"]
    return kept


def retype(jax: JaxParts, function: Any, results: Sequence[Any]) -> None:
    """Has a function be of its arguments' types as they are now, and of these of results."""
    inputs = [one.type for one in function.regions[0].blocks[0].arguments]
    function.attributes["function_type"] = jax.ir.TypeAttr.get(jax.ir.FunctionType.get(inputs, results))


def owner_of(value: Any) -> Any:
    """The operation that makes a value; None of a block's argument."""
    return getattr(value.owner, "operation", None) if hasattr(value.owner, "results") else None


def changes_nothing(one: Any) -> bool:
    """TensorFlow writes whole, static sizes down once more."""
    named = one.name in ("stablehlo.reshape", "stablehlo.set_dimension_size")
    return named and one.results[0].type == one.operands[0].type


def origin(value: Any, *through: str) -> Any:
    """What a value is before operations that change nothing, and others of these names."""
    while (one := owner_of(value)) is not None and (changes_nothing(one) or one.name in through):
        value = one.operands[0]
    return value


def _alias(jax: JaxParts, main: Any, results: Mapping[int, int]) -> None:
    """Has results take the memory of parameters; `results` is by the parameter."""
    int32 = jax.ir.IntegerType.get_signless(32)
    attributes: list[dict[str, Any]] = [{} for _ in main.type.inputs]
    for parameter, result in results.items():
        attributes[parameter]["tf.aliasing_output"] = jax.ir.IntegerAttr.get(int32, result)
    main.attributes["arg_attrs"] = jax.ir.ArrayAttr.get([jax.ir.DictAttr.get(named) for named in attributes])


def _tensor_type(jax: JaxParts, found: Any) -> TensorType:
    names = {"i1": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
    element = str(found.element_type)
    if element not in names:
        names[element] = element.replace("ui", "uint") if element.startswith("u") else element.replace("i", "int")
    return tuple(found.shape), names[element]
