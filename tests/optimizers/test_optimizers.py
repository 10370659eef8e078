"""Every optimizer against its equations in float64 NumPy, and the update under a condition on several replicas."""

import math

import gin
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher import optimizers
from launcher.errors import UsageError
from launcher.optimizers.methods import LAMB, LARS

pytestmark = pytest.mark.slow

TOTAL_STEPS = 10
PATHS = ("dense/kernel", "dense/bias", "norm/gamma", "norm/beta", "head/kernel")
SHAPES = ((3, 4), (4,), (4,), (4,), (4, 2))
EXCLUDED = (False, True, True, True, False)


def initial_weights():
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    weights[4][:] = 0.0  # a zero-initialised layer, whose norm makes no ratio
    return weights


def random_gradients():
    rng = np.random.default_rng(2)
    return [[rng.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(TOTAL_STEPS)]


def make_variables():
    variables = []
    for path, weight in zip(PATHS, initial_weights(), strict=True):
        layer, name = path.split("/")
        with keras.name_scope(layer):
            variables.append(keras.Variable(weight, name=name))
    assert tuple(variable.path for variable in variables) == PATHS
    return variables


def rate(step):
    return 0.1 / (1 + step)


def falling(step, total_steps):
    return 0.1 / (1.0 + tf.cast(step, tf.float32))


def trained(optimizer):
    variables = make_variables()
    optimizer.build(variables, TOTAL_STEPS)
    apply = tf.function(optimizer.apply)
    for step, gradients in enumerate(random_gradients()):
        apply([tf.constant(gradient) for gradient in gradients], tf.constant(float(step)))
    return [variable.numpy() for variable in variables]


def oracle(update):
    """Runs `update(w, g, state, rate, t, excluded) -> w` in float64 over the same gradients; t counts from 1."""
    weights = [weight.astype(np.float64) for weight in initial_weights()]
    states = [{"m": np.zeros_like(weight), "v": np.zeros_like(weight)} for weight in weights]
    for step, gradients in enumerate(random_gradients()):
        weights = [
            update(weight, gradient.astype(np.float64), state, rate(step), step + 1, excluded)
            for weight, gradient, state, excluded in zip(weights, gradients, states, EXCLUDED, strict=True)
        ]
    return weights


def assert_close(found, expected):
    for path, one, other in zip(PATHS, found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_adds_weight_decay_to_the_gradient(momentum, nesterov):
    def update(w, g, state, rate, t, excluded):
        g = g if excluded else g + 0.3 * w
        state["m"] = momentum * state["m"] + rate * g
        return w - (momentum * state["m"] + rate * g if nesterov else state["m"])

    optimizer = optimizers.momentum(learning_rate=falling, momentum=momentum, nesterov=nesterov, weight_decay=0.3)
    assert_close(trained(optimizer), oracle(update))


def adam_direction(g, state, t, beta_1=0.8, beta_2=0.95, epsilon=1e-3):
    state["m"] = beta_1 * state["m"] + (1 - beta_1) * g
    state["v"] = beta_2 * state["v"] + (1 - beta_2) * g * g
    correction = math.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    return correction * state["m"] / (np.sqrt(state["v"]) + epsilon)


def test_adam_follows_kingma_and_ba():
    def update(w, g, state, rate, t, excluded):
        return w - rate * adam_direction(g, state, t)

    optimizer = optimizers.adam(learning_rate=falling, beta_1=0.8, beta_2=0.95, epsilon=1e-3)
    assert_close(trained(optimizer), oracle(update))


def test_adamw_decays_beside_the_update_and_by_the_learning_rate():
    def update(w, g, state, rate, t, excluded):
        return w - (0.0 if excluded else rate * 0.3 * w) - rate * adam_direction(g, state, t)

    optimizer = optimizers.adamw(learning_rate=falling, beta_1=0.8, beta_2=0.95, epsilon=1e-3, weight_decay=0.3)
    assert_close(trained(optimizer), oracle(update))


def norm(x):
    return math.sqrt(float(np.sum(x * x)))


def test_lamb_follows_algorithm_2_of_you_et_al_2019():
    def update(w, g, state, rate, t, excluded):
        state["m"] = 0.8 * state["m"] + 0.2 * g
        state["v"] = 0.95 * state["v"] + 0.05 * g * g
        r = (state["m"] / (1 - 0.8**t)) / (np.sqrt(state["v"] / (1 - 0.95**t)) + 1e-3)
        if excluded:
            return w - rate * r
        r = r + 0.3 * w
        ratio = norm(w) / norm(r) if norm(w) > 0 and norm(r) > 0 else 1.0
        return w - rate * ratio * r

    optimizer = optimizers.lamb(learning_rate=falling, beta_1=0.8, beta_2=0.95, epsilon=1e-3, weight_decay=0.3)
    assert_close(trained(optimizer), oracle(update))


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_algorithm_1_of_you_et_al_2017(nesterov):
    def update(w, g, state, rate, t, excluded):
        trust, decay = 1.0, 0.0
        if not excluded:
            decay = 0.3
            if norm(w) > 0 and norm(g) > 0:
                trust = 0.5 * norm(w) / (norm(g) + decay * norm(w) + 1e-2)
        scaled = rate * trust * (g + decay * w)
        state["m"] = 0.9 * state["m"] + scaled
        return w - (0.9 * state["m"] + scaled if nesterov else state["m"])

    optimizer = optimizers.lars(
        learning_rate=falling, nesterov=nesterov, trust_coefficient=0.5, epsilon=1e-2, weight_decay=0.3
    )
    assert_close(trained(optimizer), oracle(update))


@pytest.mark.parametrize("make", [optimizers.lamb, optimizers.lars])
def test_a_zero_gradient_makes_no_ratio_and_no_nan(make):
    optimizer = make(learning_rate=0.1, weight_decay=0.0)
    variables = make_variables()
    optimizer.build(variables, TOTAL_STEPS)
    optimizer.apply([tf.zeros(shape) for shape in SHAPES], tf.constant(0.0))
    for variable, before in zip(variables, initial_weights(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), before)


def test_weight_decay_skips_what_the_recipe_excludes():
    optimizer = optimizers.momentum(learning_rate=0.5, weight_decay=0.25, exclude_from_decay=("^head/", "gamma$"))
    variables = make_variables()
    for variable in variables:
        variable.assign(tf.ones_like(variable.value))
    optimizer.build(variables, TOTAL_STEPS)
    optimizer.apply([tf.zeros(shape) for shape in SHAPES], tf.constant(0.0))
    assert [float(variable.numpy().flat[0]) for variable in variables] == [0.875, 0.875, 1.0, 0.875, 1.0]


def test_constraints_hold_after_an_update():
    variable = keras.Variable([1.0, -1.0], name="kernel")
    variable.constraint = keras.constraints.NonNeg()
    optimizer = optimizers.momentum(learning_rate=1.0)
    optimizer.build([variable], TOTAL_STEPS)
    optimizer.apply([tf.constant([2.0, -3.0])], tf.constant(0.0))
    np.testing.assert_array_equal(variable.numpy(), [0.0, 2.0])


MAKERS = {
    "momentum": lambda: optimizers.momentum(learning_rate=falling, weight_decay=0.1),
    "adam": lambda: optimizers.adam(learning_rate=falling),
    "adamw": lambda: optimizers.adamw(learning_rate=falling),
    "lamb": lambda: optimizers.lamb(learning_rate=falling),
    "lars": lambda: optimizers.lars(learning_rate=falling, trust_coefficient=0.1),
    "a user's Lion": lambda: optimizers.Optimizer(keras.optimizers.Lion(), weight_decay=0.1, decoupled=True),
}


@pytest.mark.parametrize("name", repeated_but(["adamw", "lars"], MAKERS))
def test_a_skipped_step_leaves_no_trace_and_a_taken_one_keeps_replicas_equal(name):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = make_variables()
        optimizer = MAKERS[name]()
        optimizer.build(variables, TOTAL_STEPS)

    def state():
        everything = [*variables, *optimizer.variables]
        return [[copy.numpy() for copy in strategy.experimental_local_results(v.value)] for v in everything]

    @tf.function
    def train(gradients, step, finite):
        def replica():
            def apply():
                optimizer.apply(gradients, step)
                return tf.constant(True)

            return tf.cond(finite, apply, lambda: tf.constant(False))

        strategy.run(replica)

    gradients = random_gradients()
    before = state()
    train(gradients[0], tf.constant(0.0), tf.constant(False))
    for old, new in zip(before, state(), strict=True):
        np.testing.assert_array_equal(old, new)

    for step in (1, 2):
        train(gradients[step], tf.constant(float(step)), tf.constant(True))
    after = state()
    for one, other in after:
        np.testing.assert_array_equal(one, other)
    assert all(np.any(old[0] != new[0]) for old, new in zip(before[: len(PATHS)], after, strict=False))
    counts = [copies for v, copies in zip([*variables, *optimizer.variables], after, strict=True) if "iter" in v.path]
    assert counts == [[2, 2]]

    train(gradients[3], tf.constant(3.0), tf.constant(False))
    for old, new in zip(after, state(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_mirrored_run_equals_a_run_on_one_device():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = make_variables()
        optimizer = MAKERS["lamb"]()
        optimizer.build(variables, TOTAL_STEPS)

    @tf.function
    def train(gradients, step):
        strategy.run(optimizer.apply, args=(gradients, step))

    for step, gradients in enumerate(random_gradients()):
        train([tf.constant(gradient) for gradient in gradients], tf.constant(float(step)))
    for variable, alone in zip(variables, trained(MAKERS["lamb"]()), strict=True):
        np.testing.assert_array_equal(variable.numpy(), alone)


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_holds_the_slots_and_the_count_but_not_keras_learning_rate(name):
    variables = make_variables()
    optimizer = MAKERS[name]()
    optimizer.build(variables, TOTAL_STEPS)
    slots_per_variable = {"adam": 2, "adamw": 2, "lamb": 2}.get(name, 1)
    assert len(optimizer.variables) == 1 + slots_per_variable * len(PATHS)
    assert not [variable.path for variable in optimizer.variables if "learning_rate" in variable.path]
    assert len({variable.path for variable in optimizer.variables}) == len(optimizer.variables)


@pytest.mark.parametrize("name", ["momentum", "adamw", "lamb", "lars"])
def test_slots_are_float32_under_a_mixed_policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        optimizer = MAKERS[name]()
        optimizer.build(layer.trainable_variables, TOTAL_STEPS)
    finally:
        keras.config.set_dtype_policy(before)
    assert {str(v.dtype) for v in optimizer.variables if "iteration" not in v.path} == {"float32"}


def test_slots_have_the_same_names_in_every_build():
    def paths():
        optimizer = optimizers.adamw(learning_rate=0.1)
        optimizer.build(make_variables(), TOTAL_STEPS)
        return [variable.path for variable in optimizer.variables]

    assert paths() == paths()
    assert paths()[:2] == ["adamw/iteration", "adamw/dense_kernel_momentum"]


def test_the_learning_rate_is_the_schedule_of_the_runs_step_and_length():
    optimizer = optimizers.momentum(learning_rate=lambda step, total_steps: step / total_steps)
    optimizer.build(make_variables(), 40)
    found = optimizer.learning_rate(tf.constant(10.0))
    assert found.dtype == tf.float32
    assert float(found) == 0.25


@pytest.mark.parametrize(
    ("given", "at_3"),
    [(0.125, 0.125), (keras.optimizers.schedules.PolynomialDecay(1.0, decay_steps=4, end_learning_rate=0.0), 0.25)],
)
def test_a_users_keras_optimizer_keeps_its_own_learning_rate(given, at_3):
    optimizer = optimizers.Optimizer(keras.optimizers.RMSprop(learning_rate=given))
    optimizer.build(make_variables(), TOTAL_STEPS)
    assert float(optimizer.learning_rate(tf.constant(3.0))) == at_3


def a_rate():
    return 0.1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "train.microbatches"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), "train.loss_scale"),
        (lambda: keras.optimizers.SGD(use_ema=True), "train.ema_decay"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "train.loss_scale"),
        (lambda: keras.optimizers.SGD(learning_rate=a_rate), "give learning_rate to"),
        (lambda: "sgd", "got str"),
    ],
)
def test_what_keras_would_do_per_replica_is_refused_with_the_binding_to_use(make, says):
    with pytest.raises(UsageError) as caught:
        optimizers.Optimizer(make())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: optimizers.momentum(learning_rate=-0.1), "learning_rate = -0.1"),
        (lambda: optimizers.momentum(learning_rate=float("nan")), "learning_rate = nan"),
        (lambda: optimizers.momentum(learning_rate=0.1, momentum=1.0), "momentum.momentum = 1.0"),
        (lambda: optimizers.momentum(learning_rate=0.1, weight_decay=-1.0), "weight_decay = -1.0"),
        (lambda: optimizers.adam(learning_rate=0.1, beta_2=1.5), "adam.beta_2 = 1.5"),
        (lambda: optimizers.adam(learning_rate=0.1, epsilon=0.0), "adam.epsilon = 0.0"),
        (lambda: optimizers.lamb(learning_rate=0.1, weight_decay=-1.0), "lamb.weight_decay = -1.0"),
        (lambda: optimizers.lars(learning_rate=0.1, trust_coefficient=-1.0), "lars.trust_coefficient = -1.0"),
        (lambda: optimizers.adamw(learning_rate=0.1, exclude_from_decay="bias$"), "must be a list"),
        (lambda: optimizers.lars(learning_rate=0.1, exclude_from_decay=["("]), "no regular expression"),
        (lambda: optimizers.Optimizer(keras.optimizers.SGD(), weight_decay=0.1), "decoupled=True"),
    ],
)
def test_arguments_out_of_range_are_refused_with_the_value(make, says):
    with pytest.raises(UsageError) as caught:
        make()
    assert says in str(caught.value)


def test_an_optimizer_made_outside_of_the_scope_is_refused():
    optimizer = optimizers.momentum(learning_rate=0.1)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = make_variables()
        with pytest.raises(UsageError, match="outside of the strategy's scope"):
            optimizer.build(variables, TOTAL_STEPS)


def test_an_optimizer_cannot_be_built_twice():
    optimizer = optimizers.momentum(learning_rate=0.1)
    optimizer.build(make_variables(), TOTAL_STEPS)
    with pytest.raises(UsageError, match="built for other variables"):
        optimizer.build(make_variables(), TOTAL_STEPS)


def test_a_weight_that_would_be_aggregated_is_refused():
    variable = keras.Variable([1.0], name="kernel", aggregation="mean")
    if variable.value.aggregation == tf.VariableAggregation.NONE:
        pytest.skip("this Keras aggregates nothing")
    with pytest.raises(UsageError, match="without aggregation='mean'"):
        optimizers.momentum(learning_rate=0.1).build([variable], TOTAL_STEPS)


def test_a_schedule_that_is_no_scalar_is_refused():
    optimizer = optimizers.momentum(learning_rate=lambda step, total_steps: tf.ones([2]))
    with pytest.raises(UsageError, match=r"scalar, got shape \(2,\)"):
        optimizer.build(make_variables(), TOTAL_STEPS)


@pytest.mark.parametrize(
    "optimizer", [LAMB(exclude=["bias$"], layer_decay=0.2), LARS(nesterov=True, trust_coefficient=0.5)]
)
def test_our_keras_optimizers_can_be_made_again_from_their_configuration(optimizer):
    config = optimizer.get_config()
    assert type(optimizer).from_config(config).get_config() == config


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "lamb", "lars"])
def test_recipes_bind_optimizers_and_schedules_by_name(optimizer):
    gin.clear_config()
    try:
        gin.parse_config(f"{optimizer}.learning_rate = @cosine()\ncosine.peak = 0.5\ncosine.warmup_fraction = 0.1")
        made = gin.get_configurable(optimizer)()
    finally:
        gin.clear_config()
    made.build(make_variables(), 100)
    assert float(made.learning_rate(tf.constant(9.0))) == 0.5


@pytest.mark.parametrize(
    ("optimizer", "writes"),
    [
        (keras.optimizers.SGD(0.1, momentum=0.9), 0),
        (keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), 0),
        (keras.optimizers.Adam(0.1), 3),
        (keras.optimizers.AdamW(0.1, beta_1=0.8, epsilon=1e-3, weight_decay=0.0), 3),
    ],
)
def test_keras_own_optimizers_move_each_weight_in_few_operations_to_the_bits_of_keras(optimizer, writes):
    ours, theirs = make_variables(), make_variables()
    of_keras = type(optimizer).from_config(optimizer.get_config())
    optimizer = optimizers.Optimizer(optimizer)
    optimizer.build(ours, TOTAL_STEPS)
    of_keras.build(theirs)
    step = tf.function(lambda gradients: optimizer.apply(gradients, tf.constant(0.0)))
    for gradients in random_gradients():
        step([tf.constant(gradient) for gradient in gradients])
        for gradient, variable in zip(gradients, theirs, strict=True):
            of_keras.update_step(tf.constant(gradient), variable, tf.constant(0.1))
        of_keras.iterations.assign_add(1)
    for one, other in zip(ours, theirs, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes(), one.path
    nodes = step.get_concrete_function([tf.constant(one) for one in gradients]).graph.as_graph_def().node
    assert sum(node.op.startswith("Assign") for node in nodes) == 1 + writes * len(ours)
    assert sum(node.op == "Pow" for node in nodes) == (2 if writes else 0), "made anew for each weight"
