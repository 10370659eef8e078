"""Keras's optimizers in Launcher's step, against Keras's own `apply_gradients` on one device."""

import contextlib
import importlib

import gin
import keras
import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but

from launcher.errors import UsageError
from launcher.machine import versions
from launcher.optimizers import Optimizer
from launcher.step.clipping import Clipping

pytestmark = pytest.mark.slow

STEPS = 4
SHAPES = {"embedding/embeddings": (5, 4), "dense/kernel": (4, 3), "dense/bias": (3,), "head/kernel": (3, 2)}


def given(seed):
    numbers = np.random.default_rng(seed)
    return [numbers.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def variables():
    made = []
    for path, value in zip(SHAPES, given(0), strict=True):
        layer, name = path.split("/")
        with keras.name_scope(layer):
            made.append(keras.Variable(value, name=name))
    return made


def excluding(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


class OwnMethods(keras.optimizers.SGD):
    """Each method does something that shows if it is left out, and none is linear in a replica's share of gradients."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(tf.clip_by_norm(gradient, 0.4), one) for gradient, one in grads_and_vars])

    def apply(self, grads, trainable_variables=None):
        super().apply([gradient + 0.1 for gradient in grads], trainable_variables)
        for variable in trainable_variables:
            variable.assign(0.9 * variable)

    def _clip_gradients(self, grads):
        return [tf.clip_by_value(gradient, -0.2, 0.2) for gradient in grads]

    def _apply_weight_decay(self, variables):
        for variable in variables:
            variable.assign(variable - 0.01)

    def _get_current_learning_rate(self):
        return self._learning_rate / (1.0 + tf.cast(self.iterations, tf.float32))


class OwnStep(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient - tf.reduce_mean(gradient), variable, learning_rate)


ALL = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, global_clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.3),
    "AdamW, not of biases": lambda: excluding(keras.optimizers.AdamW(0.1, weight_decay=0.3)),
    "Nadam": lambda: keras.optimizers.Nadam(0.1, clipnorm=0.5),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.1, weight_decay=0.1, clipvalue=0.3),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "Muon": lambda: keras.optimizers.Muon(0.1, weight_decay=0.1),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.1, warmup_steps=2),
    "SGD, by methods of its own": lambda: OwnMethods(0.5, momentum=0.9, weight_decay=0.1),
    "Adam, with an own update_step": lambda: OwnStep(0.1, weight_decay=0.1, clipnorm=0.5),
}


def trained_by_keras(make):
    weights, optimizer = variables(), make()
    for step in range(STEPS):
        optimizer.apply_gradients(zip(map(tf.constant, given(1 + step)), weights, strict=True))
    return [weight.numpy() for weight in weights]


KEPT = ("AdamW, not of biases", "Muon", "ScheduleFreeAdamW", "SGD, by methods of its own")


@pytest.mark.parametrize("name", repeated_but(KEPT, ALL))
def test_a_keras_optimizer_on_two_replicas_does_what_keras_does_on_one_device(name):
    if not hasattr(keras.optimizers, name.partition(",")[0]):
        pytest.skip(f"this Keras has no {name}")
    if name == "Muon" and versions.of(keras.__version__) < (3, 13):
        pytest.skip("this Keras's own Muon asks variables of TensorFlow for a path, which they have not")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weights, optimizer = variables(), Optimizer(ALL[name]())
        optimizer.build(weights, STEPS)
    clipping = Clipping(**optimizer.clipping)

    @tf.function
    def train(gradients, step):
        def replica(gradients):
            values = [tf.convert_to_tensor(weight) for weight in weights]
            clipped = clipping.apply(gradients, tf.linalg.global_norm(gradients), values)
            # As in a step: no assignment may need the cross-replica context.
            return tf.cond(tf.reduce_all(tf.math.is_finite(clipped[0])), lambda: update(clipped), lambda: False)

        def update(clipped):
            optimizer.apply(clipped, step)
            return True

        strategy.run(replica, args=(gradients,))

    for step in range(STEPS):
        train([tf.constant(one) for one in given(1 + step)], tf.constant(float(step)))
    for path, weight, expected in zip(SHAPES, weights, trained_by_keras(ALL[name]), strict=True):
        for copy in strategy.experimental_local_results(weight.value):
            np.testing.assert_allclose(copy.numpy(), expected, rtol=2e-6, atol=2e-7, err_msg=path)


def test_nadams_product_of_momentum_factors_is_part_of_a_checkpoint():
    weights, optimizer = variables(), Optimizer(keras.optimizers.Nadam(0.1))
    optimizer.build(weights, STEPS)
    optimizer.apply([tf.constant(one) for one in given(1)], tf.constant(0.0))
    assert [float(v.numpy()) for v in optimizer.variables if v.shape == () and v.dtype == "float32"] == [
        pytest.approx(0.9 * (1 - 0.5 * 0.96))
    ]


def built(optimizer, replicas=1, **recipe):
    """A session whose one weight has a gradient of 1 in every step."""

    def model():
        return keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    def loss(model, batch, training):
        return tf.reduce_sum(model(batch["x"], training=training)), tf.cast(tf.shape(batch["x"])[0], tf.float32), {}

    task = small_run.GivenTask({"x": np.ones((4, 2, 1), np.float32)}, model, loss)
    return small_run.build(task, replicas, optimizer=optimizer, steps=4, **recipe)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_a_rate_that_was_set_is_that_of_the_steps_after_and_part_of_a_checkpoint(replicas):
    made = []

    def optimizer():
        made.append(keras.optimizers.SGD(0.5))
        return Optimizer(made[-1], settable_rate=True)

    session = built(optimizer, replicas)
    trainer = session.trainer
    batches = trainer.batches(session.plan.data)
    before = trainer.model.weights[0].numpy().item()
    assert trainer.train(batches, 1).learning_rate == [0.5]
    assert trainer.model.weights[0].numpy().item() == pytest.approx(before - 0.5)
    made[-1].learning_rate = 0.125
    np.testing.assert_array_equal(trainer.train(batches, 2).learning_rate, [0.125, 0.125])
    assert trainer.model.weights[0].numpy().item() == pytest.approx(before - 0.75)
    snapshot = trainer.state.snapshot()

    resumed = built(optimizer, replicas).trainer
    resumed.state.restore(snapshot)
    assert resumed.train(resumed.batches(session.plan.data), 1).learning_rate == [0.125]


def test_a_bound_of_the_keras_optimizer_is_that_of_the_step_and_contradicts_another_one():
    session = built(lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.25))
    before = session.model.weights[0].numpy().item()
    session.trainer.train(session.trainer.batches(session.plan.data), 1)
    assert session.model.weights[0].numpy().item() == pytest.approx(before - 0.25)
    with pytest.raises(UsageError, match=r"'Clipping.global_norm': 0.25.*'Clipping.value': 1.0.*give one of them"):
        built(lambda: keras.optimizers.SGD(1.0, global_clipnorm=0.25), clipping={"value": 1.0})


def test_two_weight_decays_are_refused():
    with pytest.raises(UsageError, match=r"beside the Keras optimizer's own 0\.2"):
        Optimizer(keras.optimizers.SGD(0.1, weight_decay=0.2), weight_decay=0.1, decoupled=True)


def test_an_own_update_step_is_called_by_itself_and_what_goes_by_own_methods_takes_no_settings_beside_its_own():
    Optimizer(OwnStep(0.1), learning_rate=0.2).build(variables(), STEPS, [0.5, 1.0, 1.0, 1.0])
    for settings, more in [({"learning_rate": 0.2}, {}), ({}, {"rate_multipliers": [0.5, 1.0, 1.0, 1.0]})]:
        with pytest.raises(UsageError, match=r"_apply_weight_decay.* of OwnMethods .* goes by the rate"):
            Optimizer(OwnMethods(0.1), **settings).build(variables(), STEPS, **more)


@pytest.mark.parametrize("name", ["scale_loss", "_all_reduce_sum_gradients"])
def test_a_method_of_an_optimizers_own_that_no_step_calls_is_refused(name):
    kind = type("Own", (keras.optimizers.SGD,), {name: lambda optimizer, given: given})
    with pytest.raises(UsageError, match=f"Own .* has its own {name}, which no step calls.*apply_gradients"):
        Optimizer(kind(0.1))


@pytest.mark.parametrize(
    ("bindings", "name", "at_9"),
    [
        ("RMSprop.learning_rate = @cosine()\ncosine.peak = 0.5\ncosine.warmup_fraction = 0.1", "RMSprop", 0.5),
        ("Adadelta.learning_rate = 1", "keras.optimizers.Adadelta", 1.0),
        ("", "keras.optimizers.Adagrad", 0.001),
        ("SGD.learning_rate = @ExponentialDecay()", "keras.optimizers.SGD", 0.4 * 0.5**0.9),
    ],
)
def test_recipes_bind_keras_optimizers_by_name_with_keras_or_own_schedules(bindings, name, at_9):
    with bound(bindings):
        made = gin.get_configurable(name)()
    made.build(variables(), 100)
    assert float(made.learning_rate(tf.constant(9.0))) == pytest.approx(at_9)


def test_what_keras_refuses_is_a_message():
    with bound("Lion.beta_1 = 2.0"), pytest.raises(UsageError, match=r"keras\.optimizers\.Lion: .*beta_1=2\.0"):
        gin.get_configurable("Lion")()


def test_recipes_bind_keras_losses_by_name():
    importlib.import_module("launcher.optimizers.builders")
    with bound("keras.losses.Huber.delta = 2.0"):
        loss = gin.get_configurable("keras.losses.Huber")()
    assert type(loss) is keras.losses.Huber
    assert float(loss(np.array([[0.0]]), np.array([[10.0]]))) == pytest.approx(2.0 * (10.0 - 0.5 * 2.0))


@contextlib.contextmanager
def bound(bindings):
    gin.clear_config()
    rates = {"initial_learning_rate": 0.4, "decay_steps": 10, "decay_rate": 0.5}
    try:
        gin.parse_config([f"ExponentialDecay.{name} = {value}" for name, value in rates.items()])
        gin.parse_config(bindings)
        yield
    finally:
        gin.clear_config()


def test_an_optimizer_of_others_says_what_to_use_for_rates_that_differ():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has none")
    parts = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {"base/.*": keras.optimizers.Adam()})
    with pytest.raises(UsageError, match=r"MultiOptimizer .*train\.rate_multipliers"):
        Optimizer(keras.optimizers.MultiOptimizer(parts))
