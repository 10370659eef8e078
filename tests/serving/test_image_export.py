"""Images exported with the decoding of their files."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from building import build_session

from launcher.data.images import digits
from launcher.data.pipeline import Shard


def test_png_files_are_classified_as_the_images_of_the_evaluation_are():
    made = build_session("resnet_cpu.gin", ["resnet.depth = 8", "train.steps = 1"])
    served = made.plan.recipe.task.served(made.model)
    assert served.input_name == "image"
    images = digits.load()[1]["image"][:20]
    files = [tf.io.encode_png(tf.cast(tf.round(image * (255 / 16)), tf.uint8)).numpy() for image in images]
    found = tf.function(served.function, input_signature=[tf.TensorSpec([None], tf.string)])(tf.constant(files))
    shard = Shard(global_batch_size=20, num_replicas=1, first_replica=0, local_replicas=1, seed=0)
    batch = next(iter(made.plan.data.eval_batches(shard)))
    expected = tf.nn.softmax(made.model(batch["image"], training=False)).numpy()
    np.testing.assert_allclose(found["probabilities"], expected, atol=0.02)
    assert found["class"].shape == (20,) and (found["class"].numpy() == expected.argmax(axis=1)).mean() >= 0.9
