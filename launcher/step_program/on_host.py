"""What a step does with its batch alone and XLA cannot, such as looking words up, done by the host that has the batch.

Most often those are layers at a model's input: StringLookup, Hashing, TextVectorization. The graph of the step is cut
in two where what comes of such operations is numbers of a known shape; the model, and its file, are as they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.batch_spec import BatchSpec
from launcher.errors import UsageError
from launcher.step.statistics import captures
from launcher.step_program import cannot_lower, xla_forms

_NO_NUMBERS = (tf.string, tf.variant, tf.resource)
_HAS_STATE = "Random|Stateful|Iterator|PyFunc|EagerPyFunc|Placeholder"
_ANYWHERE = ("Placeholder", "Const", "Assert")  # with text, too: of messages


@dataclasses.dataclass(frozen=True)
class Cut:
    """A step in two: its batch becomes another one on the host, and that goes to the devices.

    Attributes:
      of_batch: makes it of one replica's batch.
      step: the rest, a function of what that makes, by the order of names in `spec`.
      spec: of one replica's batch, as it goes to the devices.
    """

    of_batch: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
    step: Any
    spec: BatchSpec


def cut(
    traced: tf.types.experimental.ConcreteFunction,
    spec: BatchSpec,
    variables: Collection[int],
    operations: Collection[str],
    model: keras.Model,
) -> Cut | None:
    """The step in two, or None where there is nothing that the host could do.

    Args:
      traced: takes the tensors of `spec` in the order of their names.
      variables: ids of the handles of the run's variables.
      operations: types of those that XLA does not take, beside all that is about text and tables.

    Raises:
      CannotLowerError: what the host would make has sizes that are not known before; names the layer of the model.
    """
    has_text = any(one.dtype == tf.string for one in spec.values())
    has_tables = any(one.dtype == tf.resource and id(one) not in variables for one, _ in captures(traced))
    return _Graph(traced, spec, operations).cut(model) if operations or has_text or has_tables else None


class _Graph:
    def __init__(self, traced: Any, spec: BatchSpec, operations: Collection[str]):
        self.traced, self.spec, self.forms = traced, dict(sorted(spec.items())), list[Any]()
        self.inputs = {inner.op: name for inner, name in zip(traced.inputs, self.spec, strict=False)}
        self.captured = {inner.op: outer for outer, inner in captures(traced)}
        self.definition = traced.graph.as_graph_def()
        library = {one.signature.name: one for one in self.definition.library.function}

        def is_foreign(node: Any) -> bool:
            if node.op in _ANYWHERE:
                return False
            dtypes, called = set[int](), list[Any]()
            for value in node.attr.values():
                dtypes |= {value.type, *value.list.type}
                called += library[value.func.name].node_def if value.HasField("func") else []
            is_about_text = tf.string.as_datatype_enum in dtypes or "LookupTable" in node.op
            return is_about_text or node.op in operations or any(map(is_foreign, called))

        self.live = self._upstream(traced.outputs, but=())
        self.foreign, self.tainted, self.movable = set[Any](), set[Any](), set[Any]()
        for one in traced.graph.get_operations():
            before = {tensor.op for tensor in one.inputs}
            if one in self.live and is_foreign(one.node_def):  # XLA has none
                self.foreign.add(one)
            if one in self.foreign or before & self.tainted:  # it depends on that
                self.tainted.add(one)
            is_given = one in self.inputs or (one in self.captured and _is_table(one.outputs[0]))
            if is_given or (before <= self.movable and not re.match(_HAS_STATE, one.type)):
                self.movable.add(one)  # it depends on the batch and on tables alone

    def cut(self, model: keras.Model) -> Cut | None:
        host, more, crossing, shapes = (
            set[Any](),
            self.foreign & self.movable,
            list[tf.Tensor](),
            list[tf.TensorShape](),
        )
        if not more and not any(one.type in xla_forms.FORMS for one in self.foreign):
            return None
        while more:
            host |= more | self._upstream(tensor for one in more for tensor in one.inputs)
            made = [tensor for one in host & self.tainted for tensor in one.outputs if self._users(tensor) - host]
            crossing = sorted((one for one in made if one.dtype not in _NO_NUMBERS), key=lambda one: one.name)
            shapes = self._tried(crossing)
            known = {one.name for one, shape in zip(crossing, shapes, strict=True) if shape.is_fully_defined()}
            more = {user for one in made if one.name not in known for user in self._users(one)} & self.movable - host
            if unknown := [one for one in crossing if one.name not in known and not more]:
                raise cannot_lower.of_unknown_shape(unknown[0], self.traced.graph, model)
        return self._in_two(crossing, shapes, host)

    def _users(self, tensor: tf.Tensor) -> set[Any]:
        return set(tensor.consumers()) & self.live

    def _tried(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorShape]:
        """Shapes of what the host makes: where the graph does not know one, that of two batches of other data."""
        shapes = [tensor.shape for tensor in tensors]
        if not all(shape.is_fully_defined() for shape in shapes):
            made = self._function(tensors)
            with contextlib.suppress(tf.errors.OpError):  # of a lookup that takes known words alone
                few, many = (made(*(_made_up(one, is_long) for one in self.spec.values())) for is_long in (0, 1))
                pairs = zip(shapes, few, many, strict=True)
                shapes = [one.shape if one.shape == other.shape else shape for shape, one, other in pairs]
        return shapes

    def _in_two(self, crossing: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape], host: set[Any]) -> Cut:
        made = {f"made on the host/{place}": one for place, one in enumerate(crossing)}
        of_device = self._upstream(self.traced.outputs, {one.name for one in crossing}, but=host)
        kept = {name: one.outputs[0] for one, name in self.inputs.items() if one in of_device}
        sizes = dict(zip(made, shapes, strict=True))
        spec = {name: self.spec[name] for name in kept}
        # Of each replica a row at least, as a batch is divided by its rows.
        spec |= {name: tf.TensorSpec(size if size.rank else [1], made[name].dtype) for name, size in sizes.items()}
        spec = dict(sorted(spec.items()))
        rest, on_host = self._imported(of_device, self.traced.outputs), self._function(crossing)

        @tf.function(jit_compile=True, autograph=False)
        def step(*batch: tf.Tensor) -> Any:
            given = dict(zip(spec, batch, strict=True))
            found = {one.name: tf.reshape(given[name], sizes[name], name="from_host") for name, one in made.items()}
            found |= {one.name: given[name] for name, one in kept.items()}
            return tf.nest.pack_sequence_as(self.traced.structured_outputs, rest(found))

        def of_batch(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            with tf.device("/CPU:0"):
                found = on_host(*(tf.constant(batch[name]) for name in self.spec))
            numbers = dict(batch)
            for (name, shape), one in zip(sizes.items(), found, strict=True):
                if one.shape != shape:
                    raise UsageError(
                        f"of this batch a layer at the model's input makes {one.shape}, and of another {shape}: XLA "
                        "needs one size; have it pad, as TextVectorization does with output_sequence_length"
                    )
                numbers[name] = one.numpy().reshape(spec[name].shape)
            return {name: numbers[name] for name in spec}

        return Cut(of_batch, step, spec)

    def _function(self, results: Sequence[tf.Tensor]) -> Callable[..., list[tf.Tensor]]:
        """What the host makes, of a batch's tensors by the order of their names."""
        imported = self._imported(self._upstream(results), results)

        @tf.function(autograph=False)
        def on_host(*batch: tf.Tensor) -> list[tf.Tensor]:
            return imported({op.outputs[0].name: one for op, one in zip(self.inputs, batch, strict=True)})

        with tf.device("/CPU:0"):
            return on_host.get_concrete_function(*self.spec.values())

    def _upstream(
        self, tensors: Iterable[tf.Tensor], given: Collection[str] = (), but: Collection[Any] | None = None
    ) -> set[Any]:
        """The operations that make these, from what is given; with those that are done before, such as assignments,
        `but` for some.
        """
        found, left = set[Any](), [tensor.op for tensor in tensors if tensor.name not in given]
        while left:
            if (one := left.pop()) not in found:
                found.add(one)
                left += [tensor.op for tensor in one.inputs if tensor.name not in given]
                left += [] if but is None else [before for before in one.control_inputs if before not in but]
        return found

    def _imported(self, found: set[Any], results: Sequence[tf.Tensor]) -> Callable[..., list[tf.Tensor]]:
        """A part of the graph as a function of tensors by their names in it."""
        part = tf.compat.v1.GraphDef()
        part.CopyFrom(self.definition)
        del part.node[:]
        nodes = {one.name: one for one in found if one not in self.inputs and one not in self.captured}
        for node in (node for node in self.definition.node if node.name in nodes):
            (kept := part.node.add()).CopyFrom(node)
            kept.attr.pop("_class", None)  # of operations that stand beside others, which may not be here
            kept.input[:] = [one for one in node.input if not one.startswith("^") or one[1:] in nodes]
            if nodes[node.name] in self.foreign:
                self.forms.append(xla_forms.replace(kept, nodes[node.name], part.library))

        def run(mapped: dict[str, tf.Tensor]) -> list[tf.Tensor]:
            graph: Any = tf.compat.v1.get_default_graph()
            mapped |= {one.outputs[0].name: graph.capture(self.captured[one]) for one in found & self.captured.keys()}
            used = {one if ":" in one else f"{one}:0" for node in part.node for one in node.input}
            wanted = [one.name for one in results if one.name not in mapped]
            given = {name: one for name, one in mapped.items() if name in used}
            made = zip(wanted, tf.graph_util.import_graph_def(part, given, wanted, name=""), strict=True)
            mapped |= made
            return [mapped[one.name] for one in results]

        return run


def _is_table(captured: tf.Tensor) -> bool:
    """Whether what a step captures is a table, or a tensor; no other resource, such as the state of a generator."""
    return captured.dtype != tf.resource or all("LookupTable" in user.type for user in captured.consumers())


def _made_up(spec: tf.TensorSpec, is_long: int) -> tf.Tensor:
    """Data of no meaning, in which a text has no words or more and more of them."""
    rows = [row * is_long for row in range(math.prod(spec.shape))]
    made = [" ".join("ab" * row) for row in rows] if spec.dtype == tf.string else tf.cast(rows, spec.dtype)
    return tf.reshape(made, spec.shape)
