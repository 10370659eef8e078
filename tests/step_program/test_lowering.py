"""The training step as a StableHLO program: its reductions, its arguments, and what it refuses."""

from __future__ import annotations

import os
import re
import sys

import keras
import numpy as np
import pods
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.runtime import initial_values
from launcher.step import gradients
from launcher.step_program import jax_parts, lowering
from launcher.step_program.cannot_lower import CannotLowerError

pytestmark = pytest.mark.slow


class Module:
    """The operations of a program, each with those around it, by type and outermost first."""

    def __init__(self, text):
        jax = jax_parts.load()
        self._context = jax.new_context()
        self._module = jax.ir.Module.parse(text, self._context)
        self.operations = []
        self._visit(self._module.operation, ())

    def _visit(self, operation, path):
        inside = (*path, operation.name)
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    self.operations.append((inner, inside))
                    self._visit(inner.operation, inside)

    def reductions(self):
        """(dtype, elements, replicas that take part, operations around it) of each all_reduce."""
        found = []
        for operation, path in self.operations:
            if operation.operation.name == "stablehlo.all_reduce":
                kind = operation.operands[0].type
                groups = np.array(operation.attributes["replica_groups"]).tolist()
                found.append((str(kind.element_type), int(np.prod(kind.shape)), groups, path))
        return found

    def largest_constant(self):
        """Elements of the largest constant that is not one value throughout."""
        sizes = [0]
        for operation, _ in self.operations:
            if operation.operation.name == "stablehlo.constant" and not operation.attributes["value"].is_splat:
                sizes.append(int(np.prod(operation.results[0].type.shape)))
        return max(sizes)


def lower(plan, num_replicas):
    return lowering.lower_session(lowering.build(plan, num_replicas)).program


MLIR_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


WIRES = [("mixed_bfloat16", "bfloat16", 2**26, 1), ("mixed_float16", "float16", 2_000, 2), ("float32", "float32", 1, 1)]


@pytest.mark.parametrize(("policy", "wire", "bucket_bytes", "microbatches"), repeated_but(WIRES[1:2], WIRES))
def test_there_is_one_reduction_a_bucket_in_the_reduce_dtype(policy, wire, bucket_bytes, microbatches):
    params = (
        *pods.SMALL_CONVOLUTIONS,
        f"train.precision = '{policy}'",
        f"train.reduce_dtype = '{wire}'",
        f"train.bucket_bytes = {bucket_bytes}",
        f"train.microbatches = {microbatches}",
    )
    built = lowering.build(pods.plan_of("resnet_cpu.gin", params), 4)
    lowered, model = lowering.lower_session(built), built.model
    trained, moving = model.trainable_variables, model.non_trainable_variables
    sizes = [int(np.prod(variable.shape)) for variable in (*trained, *moving)] + [1, 1, 1]  # loss, weight, accuracy
    dtypes = [tf.as_dtype(wire)] * len(trained) + [tf.float32] * (len(moving) + 3)
    buckets = gradients.plan_buckets(sizes, dtypes, bucket_bytes)
    expected = [(MLIR_NAMES[dtypes[bucket[0]].name], sum(sizes[index] for index in bucket)) for bucket in buckets]
    found = Module(lowered.program.stablehlo).reductions()
    assert sorted(reduction[:2] for reduction in found) == sorted(expected)
    assert all(groups == [[0, 1, 2, 3]] for _, _, groups, _ in found)
    # Neither in the conditional update nor in the loop over microbatches.
    assert {path for *_, path in found} == {("builtin.module", "func.func")}


def test_the_arguments_are_the_batch_and_every_variable_and_the_results_what_a_step_changes():
    params = [*pods.SMALL_CONVOLUTIONS, "train.steps = 1"]
    built = lowering.build(pods.plan_of("resnet_cpu.gin", params), 2)
    lowered = lowering.lower_session(built)
    program, trainer = lowered.program, built.trainer
    batch = [argument for argument in program.arguments if argument.kind == "batch"]
    assert [(argument.name, argument.shape, argument.dtype) for argument in batch] == [
        ("image", (16, 8, 8, 1), "float32"),
        ("label", (16,), "int32"),
        ("weight", (16,), "float32"),
    ]
    variables = {
        argument.name: (argument.shape, argument.dtype) for argument in program.arguments if argument.kind == "variable"
    }
    assert variables == trainer.state.specs()
    assert [result.name for result in program.results if result.kind == "report"] == [
        "loss", "weight", "metrics/accuracy", "gradient_norm", "finite", "loss_scale", "learning_rate",
        "non_finite/0",
    ]  # fmt: skip
    before = trainer.state.snapshot()
    trainer.train(trainer.batches(built.plan.data), 1)
    changed = {name for name, value in trainer.state.snapshot().items() if not np.array_equal(value, before[name])}
    updated = {result.name for result in program.results if result.kind == "variable"}
    assert changed and changed <= updated
    assert "loss_scale/scale" not in updated, "float32 has no loss scale to move"


@pytest.mark.parametrize("for_tpu", [False, True])
def test_state_that_is_shared_out_is_an_argument_of_a_replicas_part(for_tpu):
    params = [*pods.SMALL_CONVOLUTIONS, "train.shard = 'optimizer'", "train.ema_decay = 0.9"]
    built = lowering.build(pods.plan_of("resnet_cpu.gin", params), 4)
    program = lowering.lower_session(built, for_tpu=for_tpu).program
    shapes = {argument.name: argument.shape for argument in program.arguments if argument.kind == "variable"}
    whole = {name: shape for name, (shape, _) in built.trainer.state.specs().items()}
    divided = {name for name, shape in shapes.items() if shape != whole[name]}
    assert divided and all(name.startswith(("optimizer/", "ema/")) for name in divided)
    assert all(4 * np.prod(shapes[name]) == np.prod(whole[name]) for name in divided)
    # A TPU's all_gather is a reduction.
    gathers = [
        path for one, path in Module(program.stablehlo).operations if one.operation.name == "stablehlo.all_gather"
    ]
    assert bool(gathers) != for_tpu
    assert set(gathers) <= {("builtin.module", "func.func")}


def test_a_recipe_is_lowered_for_a_pod_without_its_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    program = lower(pods.plan_of("resnet_tpu.gin", ["resnet.depth = 8", "train.global_batch_size = 4096"]), 64)
    assert program.num_replicas == 64
    assert program.arguments[0] == lowering.Argument(
        name="image", shape=(64, 224, 224, 3), dtype="float32", kind="batch"
    )
    module = Module(program.stablehlo)
    assert {tuple(groups[0]) for _, _, groups, _ in module.reductions()} == {tuple(range(64))}
    kinds = {
        str(operation.operands[0].type.element_type)
        for operation, _ in module.operations
        if operation.operation.name == "stablehlo.convolution"
    }
    assert kinds == {"bf16"}
    assert module.largest_constant() < 1024, "weights are arguments"
    assert list(tmp_path.iterdir()) == []


MODULE = """
import gin, keras, numpy as np, tensorflow as tf
from launcher.data.pipeline import ArrayExamples, RandomAccessData

class Inner(keras.layers.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.tags = keras.layers.CategoryEncoding(6, output_mode="multi_hot", name="tags")

    def call(self, inputs):
        return self.tags(inputs)  # inner

@gin.configurable
class Odd:
    def __init__(self, what="table"):
        self.what = what

    def data(self):
        values = np.ones((64, 8), "float32")
        return RandomAccessData(train=ArrayExamples({"x": values}))

    def model(self):
        self.table = tf.constant(np.arange(36).reshape(6, 6) / 36, tf.float32)
        self.shape = tf.constant([8, 2, 3])
        self.texts = tf.constant(["a", "b"])
        self.own = tf.Variable(1.0)
        pairs = tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4], tf.int64, tf.int64)
        self.places = tf.lookup.StaticHashTable(pairs, 0)
        self.generator = tf.random.Generator.from_seed(1)
        self.writer = tf.summary.create_file_writer("summaries") if self.what == "summary" else None
        inputs = keras.Input((8,))
        out = keras.layers.Dense(6)(inputs)
        if self.what == "hot":
            out += keras.layers.CategoryEncoding(6, output_mode="multi_hot", name="tags")(out)  # behind weights
        if self.what == "inner":
            out += Inner(name="block")(out)
        if self.what == "known":
            out += keras.layers.IntegerLookup(vocabulary=[1], name="known")(out)[:, :6]
        return keras.Model(inputs, out)

    def loss(self, model, batch, training):
        out = model(batch["x"], training=training) @ self.table  # hot
        if self.what == "python":
            out += tf.py_function(lambda: 1.0, [], tf.float32)  # python
        if self.what == "shape":
            out = tf.reshape(out, self.shape)  # shape
        if self.what == "text":
            out += tf.cast(tf.strings.length(self.texts)[0], tf.float32)
        if self.what == "check":
            tf.debugging.assert_greater(tf.reduce_sum(batch["x"]), 0.0)  # check
            out = tf.debugging.check_numerics(out, "out")  # numbers
        if self.what == "own":
            out *= self.own  # own
        if self.what == "lookup":
            out += tf.cast(self.places.lookup(tf.cast(out, tf.int64)), tf.float32)  # lookup
        if self.what == "generator":
            out += self.generator.normal(out.shape)  # generator
        if self.what == "summary":
            with self.writer.as_default(step=1):
                tf.summary.scalar("out", tf.reduce_sum(out))  # summary
        if self.what == "loop":
            while tf.reduce_sum(tf.abs(out)) > 1.0:  # loop
                out = out * 0.5
        if self.what == "control":
            if tf.reduce_sum(out) > 0:
                out *= 2.0
            for _ in tf.range(3):
                out = tf.sin(out)
            left = tf.constant(20)
            while left > tf.shape(out)[1]:
                inner = tf.constant(0)
                while inner < 2:
                    out, inner = tf.cos(out), inner + 1
                left -= 7
        if self.what == "random":
            out = tf.nn.experimental.stateless_dropout(out, 0.5, seed=[tf.cast(out[0, 0], tf.int32), 2])
            out += tf.random.stateless_uniform(out.shape, seed=[tf.cast(out[0, 0], tf.int32), 4], alg="philox")
        if self.what == "merge":
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        return tf.reduce_sum(out ** 2), tf.reduce_sum(batch["weight"]), {}
"""

RECIPE = """
import odd
train.task = @Odd()
train.optimizer = @adam
train.steps = 5
train.global_batch_size = 16
adam.learning_rate = 0.1
"""


def line_of(what):
    return 1 + next(number for number, line in enumerate(MODULE.splitlines()) if line.endswith(f"# {what}"))


@pytest.fixture
def odd(tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(MODULE)
    (tmp_path / "odd.gin").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda what="table", *more: pods.plan_of("odd.gin", [f"Odd.what = '{what}'", *more])
    gin_bindings.reset()


def test_a_tensor_beside_the_variables_is_an_argument_with_its_value(odd):
    lowered = lowering.lower_session(lowering.build(odd(), 2))
    (constant,) = [argument for argument in lowered.program.arguments if argument.kind == "constant"]
    assert constant.shape == (6, 6)
    np.testing.assert_array_equal(
        lowered.constants[constant.name], (np.arange(36).reshape(6, 6) / 36).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("what", "operation", "said"),
    [("python", "EagerPyFunc", "no operation EagerPyFunc"), ("shape", "Reshape", "given to Reshape is a tensor")],
)
def test_what_xla_cannot_compile_is_refused_with_the_operation_and_the_line(odd, what, operation, said):
    with pytest.raises(CannotLowerError, match=said) as refused:
        lower(odd(what), 2)
    assert refused.value.operation == operation
    assert refused.value.where.endswith(f"/odd.py:{line_of(what)}, in loss")
    assert refused.value.where in str(refused.value)


LAYERS = [("hot", "tags", "loss"), ("inner", "block/tags", "call")]


@pytest.mark.parametrize(
    ("what", "layer", "function", "jit_compile"),
    repeated_but(
        [(*LAYERS[0], False), (*LAYERS[1], True)],
        [(*one, jit_compile) for one in LAYERS for jit_compile in (False, True)],
    ),
)
def test_a_layer_of_keras_that_xla_cannot_compile_is_named_with_the_users_line(odd, what, layer, function, jit_compile):
    said = f"layer '{layer}' of type CategoryEncoding; .*have the data do this layer's work"
    with pytest.raises(CannotLowerError, match=said) as refused:
        lower(odd(what, f"train.jit_compile = {jit_compile}"), 2)
    assert refused.value.where.endswith(f"odd.py:{line_of(what)}, in {function}")


def test_a_loss_with_control_flow_on_tensors_is_lowered_as_it_trains(odd):
    text = lower(odd("control"), 2).stablehlo
    assert "stablehlo.sine" in text
    assert "stablehlo.cosine" in text
    assert "stablehlo.while" in text
    assert re.search(r"stablehlo\.(if|case)\b", text)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("own", "a variable or another resource that is not the model's"),
        ("lookup", "a lookup table"),
        ("generator", "a tf.random.Generator"),
        ("summary", "tf.summary"),
        ("loop", "a loop with a gradient turns as often as a tensor says"),
    ],
)
def test_what_a_step_cannot_hold_is_refused_with_the_line_and_what_to_do(odd, what, said):
    with pytest.raises(CannotLowerError, match=f"{said}.*; ") as refused:
        lower(odd(what), 2)
    assert refused.value.where.endswith(f"odd.py:{line_of(what)}")


def test_a_table_of_a_layer_is_refused_by_the_layers_name(odd):
    with pytest.raises(CannotLowerError, match=r"a lookup table \(layer 'known' of type IntegerLookup; "):
        lower(odd("known"), 2)


def test_a_tpu_draws_with_its_own_generator_what_the_caller_left_to_the_device(odd):
    """As `DefaultRngAlgForDeviceType` and `BitGenerator` in TensorFlow's tf2xla have it: a key, a word of counter."""

    def generators(**settings):
        module = Module(lowering.lower_session(lowering.build(odd("random"), 2), **settings).program.stablehlo)
        return sorted(
            (str(one.attributes["rng_algorithm"]).split()[-1].rstrip(">"), one.operands[0].type.shape[0])
            for one, _ in module.operations
            if one.operation.name == "stablehlo.rng_bit_generator"
        )

    # The last two are Philox by name: the numbers, and what scrambles their seed.
    assert generators() == 3 * [("PHILOX", 3)]
    assert generators(for_tpu=True) == [("DEFAULT", 2), ("PHILOX", 3), ("PHILOX", 3)]


def test_checks_that_xla_leaves_out_are_told(odd):
    lowered = lowering.lower_session(lowering.build(odd("check"), 2))
    left_out = [f"odd.py:{line_of(what)}" for what in ("check", "numbers")]
    assert [re.search(r"odd.py:\d+", note)[0] for note in lowered.notes] == left_out
    assert lowering.lower_session(lowering.build(odd(), 2)).notes == ()


def test_strings_in_a_step_are_refused(odd):
    with pytest.raises(CannotLowerError, match="XLA takes no strings"):
        lower(odd("text"), 2)


def test_a_model_that_merges_replicas_is_refused(odd):
    with pytest.raises(UsageError, match=re.escape("calls merge_call of its replica context")):
        lower(odd("merge"), 2)


def test_a_batch_that_cannot_be_divided_is_refused(odd):
    with pytest.raises(UsageError, match=r"16 cannot be split evenly over 3 replicas .* such as 15 or 18"):
        lower(odd(), 3)


def test_without_jax_it_says_what_to_install_before_a_model_is_built(odd, monkeypatch):
    plan = odd()
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setattr(plan.recipe.task, "model", lambda: pytest.fail("the model was built"))
    with pytest.raises(UsageError, match=r"pip install -e .*\[preflight\]"):
        lower(plan, 2)


def test_variables_of_a_step_that_is_lowered_without_values_take_no_memory(peak_growth):
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for count in (1, host // 2**32 + 1):  # it fails by the first, before the machine has no memory left
        with peak_growth() as grown, initial_values.left_out(), initial_values.scope(tf.distribute.get_strategy()):
            layers = [keras.layers.Dense(2**15, use_bias=False) for _ in range(count)]
            keras.Sequential([keras.Input((2**15,)), *layers])
            small = tf.Variable(tf.ones([8]))
        assert small.numpy().sum() == 8
        assert all(tuple(layer.kernel.shape) == (2**15, 2**15) for layer in layers)
        assert grown[0] < 2**30
