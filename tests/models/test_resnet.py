"""The residual networks against what their papers publish, and the same network on one replica and on four."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.machine import xla
from launcher.models.resnet import SubsamplingShortcut, resnet
from launcher.run import layer_settings

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seed():
    keras.utils.set_random_seed(0)


def num_trainable(model):
    return sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)


def images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# As published by torchvision for its weights.
PARAMETERS = [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)]


@pytest.mark.parametrize(("depth", "parameters"), repeated_but([(50, 25_557_032)], PARAMETERS))
def test_imagenet_parameters_are_the_published_ones(depth, parameters, monkeypatch):
    # How many there are does not depend on their values, and to draw them takes longer than all the rest.
    zeros = keras.initializers.Zeros()
    monkeypatch.setattr(keras.initializers.VarianceScaling, "__call__", lambda _, *a, **k: zeros(*a, **k))
    assert num_trainable(resnet(image_shape=(224, 224, 3), num_classes=1000, depth=depth)) == parameters


CIFAR = [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)]


@pytest.mark.parametrize(("depth", "millions"), repeated_but([(20, 0.27)], CIFAR))
def test_cifar_parameters_are_the_published_ones(depth, millions):  # He et al. 2015, table 6
    assert round(num_trainable(resnet(image_shape=(32, 32, 3), num_classes=10, depth=depth)) / 1e6, 2) == millions


POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@pytest.mark.parametrize(
    ("depth", "policy"),
    repeated_but([(8, "mixed_float16"), (8, "mixed_bfloat16")], itertools.product((8, 18), POLICIES)),
)
def test_logits_are_float32_and_the_body_follows_the_policy(depth, policy):
    keras.config.set_dtype_policy(policy)
    model = resnet(image_shape=(8, 8, 1), num_classes=10, depth=depth)
    logits = model(images(2, 8, 8, 1), training=True)
    assert logits.dtype == "float32"
    assert logits.shape == (2, 10)
    assert np.all(np.isfinite(logits))
    assert model.get_layer("stage2_block1_relu").compute_dtype == keras.DTypePolicy(policy).compute_dtype
    assert {weight.dtype for weight in model.weights} == {"float32"}


SHAPES = ((8, 8, 1), (28, 28, 1), (32, 32, 3), (7, 9, 2), (1, 1, 1))


@pytest.mark.parametrize(
    ("depth", "image_shape"),
    repeated_but([(8, (1, 1, 1)), (18, (7, 9, 2))], itertools.product((8, 18), SHAPES)),
)
def test_small_images_keep_their_resolution_in_the_stem(depth, image_shape):
    model = resnet(image_shape=image_shape, num_classes=5, depth=depth)
    assert model(images(2, *image_shape)).shape == (2, 5)
    assert model.get_layer("stage1_block1_relu").output.shape[1:3] == image_shape[:2]
    reduction = 4 if depth == 8 else 8
    last = "stage3_block1_relu" if depth == 8 else "stage4_block1_relu"
    assert model.get_layer(last).output.shape[1:3] == tuple(-(-size // reduction) for size in image_shape[:2])


def test_photographs_are_reduced_by_four_in_the_stem_and_by_32_in_all():
    model = resnet(image_shape=(224, 224, 3), num_classes=1000, depth=50)
    assert model(images(1, 224, 224, 3)).shape == (1, 1000)
    sizes = [model.get_layer(f"stage{stage}_block1_relu").output.shape[1:] for stage in range(1, 5)]
    assert sizes == [(56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048)]
    assert [model.get_layer(f"stage2_block1_conv{index}").strides for index in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("image_size", "depth", "stem", "stride"),
    repeated_but(
        [(63, 18, "auto", 1), (64, 18, "auto", 2), (64, 8, "auto", 1), (64, 18, "3x3", 1)],  # 7x7: below
        [(63, 18, "auto", 1), (64, 18, "auto", 2), (64, 8, "auto", 1), (64, 18, "3x3", 1), (32, 18, "7x7", 2)],
    ),
)
def test_stem_follows_the_image_size_unless_told(image_size, depth, stem, stride):
    model = resnet(image_shape=(image_size, 80, 3), num_classes=10, depth=depth, stem=stem)
    convolution = model.get_layer("stem_conv")
    assert convolution.strides == (stride, stride)
    assert convolution.kernel_size == ((7, 7) if stride == 2 else (3, 3))


@pytest.mark.parametrize(
    ("name", "kernel", "arguments"),
    [
        ("stem_conv", 7, {"depth": 18, "stem": "7x7"}),
        ("stage2_block1_conv1", 3, {"depth": 8}),
        ("stage2_block1_conv2", 3, {"depth": 50}),
    ],
)
def test_strided_convolutions_are_padded_alike_on_all_sides(name, kernel, arguments):
    model = resnet(image_shape=(8, 8, 3), num_classes=10, **arguments)
    convolution = model.get_layer(name)
    padded = model.get_layer(f"{name}_pad")
    value = images(1, *padded.input.shape[1:])
    centre = np.zeros(convolution.kernel.shape, np.float32)
    centre[kernel // 2, kernel // 2, 0, 0] = 1.0  # output [i, j] is input [2i, 2j], in an even image too
    convolution.kernel.assign(centre)
    actual = convolution(padded(value))
    np.testing.assert_array_equal(actual[..., 0], value[:, ::2, ::2, 0])


@pytest.mark.parametrize(("size", "before"), repeated_but([(14, 1)], [(16, 0), (14, 1)]))  # features are half as large
def test_stem_pooling_begins_where_tensorflow_pads(size, before):
    model = resnet(image_shape=(size, size, 3), num_classes=10, depth=18, stem="7x7")
    layer = model.get_layer("stem_norm")
    value = np.abs(images(1, *layer.input.shape[1:]))
    padded = np.pad(value, [(0, 0), (before, 1), (before, 1), (0, 0)])
    expected = np.max([padded[:, i : i + 7 : 2, j : j + 7 : 2] for i in range(3) for j in range(3)], axis=0)
    np.testing.assert_allclose(layer(value), expected / np.sqrt(1.0 + layer.epsilon), rtol=1e-6)


def test_subsampling_shortcut_keeps_every_second_pixel_and_adds_empty_channels():
    value = images(2, 5, 4, 3)
    shortcut = SubsamplingShortcut(filters=6, stride=2)
    expected = np.concatenate([np.zeros((2, 3, 2, 1)), value[:, ::2, ::2], np.zeros((2, 3, 2, 2))], axis=-1)
    np.testing.assert_array_equal(shortcut(value), expected)
    assert shortcut.compute_output_shape((None, 5, 4, 3)) == (None, 3, 2, 6)


@pytest.mark.parametrize(
    ("zero", "depth"),  # of 18 layers, blocks are as of 8
    repeated_but([(True, 8), (False, 8), (True, 50)], itertools.product([True, False], (8, 18, 50))),
)
def test_zero_last_gamma_makes_a_new_block_the_identity(zero, depth):
    model = resnet(image_shape=(8, 8, 3), num_classes=10, depth=depth, zero_init_last_gamma=zero)
    block = 2 if depth == 50 else 1  # the first block of a bottleneck stage widens its input
    before = "stage1_block1_relu" if depth == 50 else "stem_relu"
    both = keras.Model(
        model.input, [model.get_layer(before).output, model.get_layer(f"stage1_block{block}_relu").output]
    )
    inputs, outputs = both(images(4, 8, 8, 3), training=True)
    assert np.array_equal(inputs, outputs) == zero


def test_kernels_are_drawn_apart_with_the_variance_of_he():
    model = resnet(image_shape=(32, 32, 3), num_classes=10, depth=50)
    first, second = (model.get_layer(f"stage3_block{block}_conv2").kernel.numpy() for block in (2, 3))
    assert not np.array_equal(first, second)
    np.testing.assert_allclose([first.std(), second.std()], np.sqrt(2.0 / (9 * 256)), rtol=0.01)
    assert not any(layer.use_bias for layer in model.layers if isinstance(layer, keras.layers.Conv2D))


def test_normalisation_settings_reach_every_layer():
    model = resnet(
        image_shape=(8, 8, 1), num_classes=10, depth=18, norm_group_size=4, norm_momentum=0.5, norm_epsilon=0.1
    )
    norms = [layer for layer in model.layers if "norm" in layer.name]
    assert len(norms) == 20  # 17 convolutions and 3 projections
    assert {(norm.group_size, norm.momentum, norm.epsilon, norm.synchronized) for norm in norms} == {
        (4, 0.5, 0.1, False)
    }
    model = resnet(image_shape=(8, 8, 1), num_classes=10, depth=8, synchronized_norm=True)
    assert all(layer.synchronized for layer in model.layers if "norm" in layer.name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 19}, r"no ResNet of depth 19\. Known depths: 8, 20, 32, 44, 56, 18, 34, 50, 101, 152\."),
        ({"stem": "5x5"}, "no stem '5x5'. Known stems: auto, 7x7, 3x3"),
        ({"depth": 20, "stem": "7x7"}, "ResNet-20 .* 3x3 stem"),
        ({"image_shape": (8, 8)}, r"image_shape must be \(height, width, channels\).* \(8, 8\)"),
        ({"num_classes": 0}, "num_classes must be at least 1, and is 0"),
        ({"norm_group_size": 4, "synchronized_norm": True}, "is synchronized or"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resnet(**{"image_shape": (8, 8, 1), "num_classes": 10} | arguments)


def test_a_network_comes_back_from_its_configuration():
    model = resnet(image_shape=(8, 8, 1), num_classes=10, depth=8, norm_group_size=2)
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(again(images(4, 8, 8, 1), training=True), model(images(4, 8, 8, 1), training=True))


def step(model, x, labels):
    """Loss (a sum over the examples) and gradients, as one replica computes them."""
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return loss, tape.gradient(loss, [weight.value for weight in model.trainable_weights])


@pytest.mark.nightly  # test_topologies.py trains it on two replicas
def test_four_replicas_with_one_group_each_equal_one_replica_with_four_groups():
    if len(tf.config.list_logical_devices("CPU")) < 4:
        pytest.skip("needs logical CPU devices, configured before TensorFlow starts")
    settings = {"image_shape": (8, 8, 1), "num_classes": 10, "depth": 8, "norm_group_size": 4}
    x, labels = images(16, 8, 8, 1), np.arange(16) % 10
    one = resnet(**settings, zero_init_last_gamma=False)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    with strategy.scope():
        four = resnet(**settings, zero_init_last_gamma=False)
        four.set_weights(one.get_weights())

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        loss, gradients = step(four, *(tf.gather(np.stack(np.split(whole, 4)), index) for whole in (x, labels)))
        return loss, gradients, [tf.identity(weight.value) for weight in four.non_trainable_weights]

    loss, gradients, moving = tf.function(lambda: strategy.run(replica))()
    expected_loss, expected_gradients = tf.function(lambda: step(one, x, labels))()
    np.testing.assert_allclose(np.sum(strategy.experimental_local_results(loss)), expected_loss, rtol=1e-6)
    for ours, reference in zip(gradients, expected_gradients, strict=True):
        total = np.sum(strategy.experimental_local_results(ours), axis=0)
        np.testing.assert_allclose(total, reference, rtol=1e-4, atol=1e-5)
    for ours, reference in zip(moving, one.non_trainable_weights, strict=True):
        average = np.mean(strategy.experimental_local_results(ours), axis=0)
        np.testing.assert_allclose(average, reference.numpy(), rtol=1e-5, atol=1e-6)


def test_a_run_tells_the_stem_whether_xla_compiles():
    model = resnet(image_shape=(16, 16, 3), num_classes=10, depth=18, stem="7x7")
    recipe = SimpleNamespace(attention="auto", rematerialize=None, batch_norm="auto", task=SimpleNamespace())
    recipe.task.statistics_over_global_batch = False
    strategy = SimpleNamespace(gpu_model="", accelerator="")
    plan = SimpleNamespace(
        recipe=recipe, rematerialize=None, num_parts=1, strategy=strategy, is_one_program=False, is_compiled=False
    )
    layer_settings.apply(model, plan, lambda text: None)
    with xla.compiling(True):
        assert model.get_layer("stem_norm").compiling()
    assert not model.get_layer("stem_norm").compiling()
