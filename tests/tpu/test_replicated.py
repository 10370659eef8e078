"""The checks of what a TPU would run find what they are for: each mistake is made here once, by itself."""

from __future__ import annotations

import made_up_tpu
import pytest
import replicated
import tensorflow as tf

from launcher.step import gradients
from launcher.tasks.image_classification import ImageClassification


def summed(value):
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def traced(step) -> list[replicated.Operation]:
    """The operations of `step(x, flag, count)` on two replicas; x float32 [4], bool and int32 scalars."""
    with made_up_tpu.strategy(2) as strategy:

        @tf.function(
            input_signature=[tf.TensorSpec([4]), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)],
            autograph=False,
        )
        def run(x, flag, count):
            return strategy.run(tf.autograph.experimental.do_not_convert(step), args=(x, flag, count))

        return replicated.operations(run.get_concrete_function())


def in_loop(x, count):
    return tf.while_loop(lambda i, x: i < count, lambda i, x: (i + 1, summed(x)), (tf.constant(0), x))[1]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, flag, count: summed(x),
        lambda x, flag, count: tf.function(summed, autograph=False)(x),
        lambda x, flag, count: summed(tf.cond(flag, lambda: x, lambda: -x)),
        lambda x, flag, count: summed(tf.while_loop(lambda x: tf.norm(x) > 1.0, lambda x: (x / 2.0,), (x,))[0]),
    ],
)
def test_a_reduction_beside_conditionals_and_loops_is_right(step):
    found = traced(step)
    assert replicated.faults(found) == []
    assert replicated.reductions(found) == {("float32", 4): 1}


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (lambda x, flag, count: tf.cond(flag, lambda: summed(x), lambda: x), "If.then_branch"),
        (lambda x, flag, count: tf.cond(flag, lambda: x, lambda: summed(x)), "If.else_branch"),
        (lambda x, flag, count: tf.switch_case(count, [lambda: x, lambda: summed(x), lambda: -x]), "Case.branches"),
        (lambda x, flag, count: in_loop(x, count), "While.body"),
        (lambda x, flag, count: tf.cond(flag, lambda: tf.function(summed)(x), lambda: x), "If.then_branch"),
    ],
)
def test_a_reduction_inside_a_conditional_or_a_loop_is_a_fault(step, where):
    (fault,) = replicated.faults(traced(step))
    assert f"reduction inside {where}" in fault.replace("Stateless", "")


def printed(x):
    tf.print(x)
    return x


def printed_as_once(x):
    with tf.control_dependencies([tf.raw_ops.Print(input=x, data=[x])]):
        return tf.identity(x)


def summarised(x):
    writer = tf.summary.create_noop_writer()
    with writer.as_default(step=1):
        tf.raw_ops.WriteScalarSummary(
            writer=tf.raw_ops.SummaryWriter(), step=tf.constant(1, tf.int64), tag="x", value=x[0]
        )
    return x


def looked_up(x):
    table = tf.raw_ops.AnonymousHashTable(key_dtype=tf.int32, value_dtype=tf.float32)
    return x + tf.raw_ops.LookupTableFindV2(table_handle=table, keys=[1, 2, 3, 4], default_value=0.0)


@pytest.mark.parametrize(
    ("host", "op"),
    [
        (printed, "PrintV2"),
        (printed_as_once, "Print"),
        (summarised, "WriteScalarSummary"),
        (lambda x: tf.py_function(lambda x: x, [x], tf.float32), "EagerPyFunc"),
        (lambda x: tf.numpy_function(lambda x: x, [x], tf.float32), "PyFunc"),
        (lambda x: x + tf.strings.to_number(tf.strings.as_string(x)), "AsString"),
        (lambda x: x + tf.cast(tf.strings.length(tf.io.read_file("no file")), tf.float32), "ReadFile"),
        (lambda x: x + tf.cast(tf.timestamp(), tf.float32), "Timestamp"),
        (lambda x: x + next(iter(tf.data.Dataset.from_tensors(1.0).repeat())), "IteratorGetNext"),
        (lambda x: x + tf.io.decode_raw("abcd", tf.uint8).shape.rank, "DecodeRaw"),
        (looked_up, "LookupTableFindV2"),
        (lambda x: tf.raw_ops.CollectiveReduceV2(
            input=x, group_size=2, group_key=1, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id"
        ), "CollectiveReduceV2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("around", ["straight", "in a branch"])
def test_what_only_a_host_can_do_is_a_fault(host, op, around):
    def step(x, flag, count):
        return host(x) if around == "straight" else tf.cond(flag, lambda: host(x), lambda: x)

    assert any(fault.startswith(f"run by the host: {op} ") for fault in replicated.faults(traced(step)))


def test_what_is_marked_to_be_left_out_of_the_program_is_a_fault():
    def step(x, flag, count):
        return tf.compat.v1.tpu.outside_compilation(tf.identity, x)

    assert any(fault.startswith("run by the host: Identity") for fault in replicated.faults(traced(step)))


@pytest.mark.parametrize(
    "step",
    [
        lambda x, flag, count: tf.reduce_sum(tf.boolean_mask(x, x > 0)),
        lambda x, flag, count: tf.zeros([count]),
        lambda x, flag, count: x[:count],
        lambda x, flag, count: tf.unique(x).y,
    ],
)
def test_a_shape_that_is_known_only_when_it_is_run_is_a_fault(step):
    assert any(fault.startswith("shape not static: ") for fault in replicated.faults(traced(step)))


def test_the_host_may_do_around_the_step_what_a_replica_may_not():
    with made_up_tpu.strategy(2) as strategy:

        @tf.function
        def run(x):
            for _ in tf.range(3):
                tf.print(tf.timestamp())
                x = strategy.experimental_local_results(strategy.run(summed, args=(x,)))[0]
            return x

        found = replicated.operations(run.get_concrete_function(tf.TensorSpec([4])))
    assert replicated.faults(found) == []
    assert replicated.loops_around(found) == {("While.body",)}


# --------------------------------------------------------------------------------- the same mistakes in the real step


def faults_of_the_step() -> list[str]:
    """Of the smallest recipe, whatever has been done to the launcher."""
    bindings = ["mlp.units = 8", "train.global_batch_size = 4", "train.precision = 'float32'"]
    resolved = made_up_tpu.resolve("mlp_fashion.gin", bindings, 2)
    with made_up_tpu.strategy(2) as strategy:
        made = made_up_tpu.build(strategy, resolved)
        function = made_up_tpu.training(made, made_up_tpu.training_shapes(resolved))
    return replicated.faults(replicated.operations(function))


def test_a_step_that_reduces_only_when_all_is_well_does_not_pass(monkeypatch):
    right = gradients.reduce_sum

    def wrong(tensors, **options):
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tf.nest.flatten(tensors)])
        return tf.cond(finite, lambda: right(tensors, **options), lambda: tf.nest.map_structure(tf.identity, tensors))

    assert faults_of_the_step() == []
    monkeypatch.setattr(gradients, "reduce_sum", wrong)
    assert any("reduction inside If.then_branch" in fault for fault in faults_of_the_step())


def test_a_loss_that_prints_does_not_pass(monkeypatch):
    right = ImageClassification.loss

    def wrong(self, model, batch, training):
        loss, weight, metrics = right(self, model, batch, training)
        tf.print("loss", loss)
        return loss, weight, metrics

    monkeypatch.setattr(ImageClassification, "loss", wrong)
    assert any("run by the host: PrintV2" in fault for fault in faults_of_the_step())
