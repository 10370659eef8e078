"""One step of mixed-precision training on two replicas, written out in plain TensorFlow.

What launcher/step does for any model, optimizer and strategy is done here for one network, SGD with momentum and
MirroredStrategy, to the same weights (tests/test_examples.py). Read this first, then launcher/step/train_step.py.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

GLOBAL_BATCH, RATE, MOMENTUM, REPLICAS = 64, 0.1, 0.9, 2

# Two replicas on any machine: two devices that TensorFlow makes of one processor.
processor = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(REPLICAS)])

keras.config.set_dtype_policy("mixed_float16")  # float32 weights, float16 arithmetic
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
images, labels = load_digits(return_X_y=True)
images = images.astype("float32") / 16


def build():
    hidden = keras.layers.Dense(32, "relu", kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    logits = keras.layers.Dense(10, dtype="float32", kernel_initializer=keras.initializers.GlorotUniform(seed=2))
    model = keras.Sequential([keras.Input((64,)), hidden, logits])
    model.compile(keras.optimizers.SGD(RATE, MOMENTUM), cross_entropy)
    return model


with strategy.scope():
    model = build()
    weights = [weight.value for weight in model.trainable_variables]
    velocities = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    loss_scale = tf.Variable(2.0**15, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def replica_step(images, labels):
    replica = tf.distribute.get_replica_context()
    first = replica.replica_id_in_sync_group * GLOBAL_BATCH // REPLICAS
    rows = slice(first, first + GLOBAL_BATCH // REPLICAS)
    with tf.GradientTape() as tape:
        # A sum over this replica's examples, divided by the number of all replicas': the sum over replicas is the mean.
        losses = cross_entropy.call(labels[rows], model(images[rows]))
        loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        scaled = loss * loss_scale  # float16 holds no number below 6e-8

    # Reduced once, still scaled and in 16 bits, so that an overflow on any replica is one on all of them.
    halves = [tf.cast(gradient, tf.float16) for gradient in tape.gradient(scaled, weights)]
    gradients = [tf.cast(half, tf.float32) / loss_scale for half in replica.all_reduce("SUM", halves)]

    # Checked once: the norm is finite if and only if all gradients are, and every replica has the same norm.
    finite = tf.math.is_finite(tf.linalg.global_norm(gradients))
    replica.merge_call(update, args=(gradients, finite))
    loss_scale.assign(tf.where(finite, loss_scale, loss_scale / 2))
    return replica.all_reduce("SUM", loss)


def update(strategy, gradients, finite):
    def momentum_step(weight, velocity, gradient, finite):
        moved = MOMENTUM * velocity - RATE * gradient
        velocity.assign(tf.where(finite, moved, velocity))  # after an overflow nothing moves, this one neither
        weight.assign(tf.where(finite, weight + moved, weight))

    for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
        strategy.extended.update(weight, momentum_step, args=(velocity, gradient, finite))


@tf.function
def step(images, labels):
    return strategy.experimental_local_results(strategy.run(replica_step, args=(images, labels)))[0]


def train(steps):
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH)
    return [float(step(*batch)) for batch in batches.take(steps)]


if __name__ == "__main__":
    print(*train(20))
