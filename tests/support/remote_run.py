"""The launcher on a machine that only drives another one, as on a TPU pod; the flags are those of `launcher.main`.

REMOTE_HOST=HOST:PORT python -m remote_run FLAGS

Connected as to a TPU: the other host is where TensorFlow runs everything that is not told otherwise, and where the
variables are. One replica on its CPU stands for the cores.
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from launcher import main as entry
from launcher.machine import strategy


def connect(*_: object) -> tf.distribute.Strategy:
    address = os.environ["REMOTE_HOST"]
    cluster = tf.train.ClusterSpec({"worker": [address]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, master=f"grpc://{address}")
    tf.config.experimental_connect_to_cluster(resolver)
    return tf.distribute.OneDeviceStrategy("/job:worker/replica:0/task:0/device:CPU:0")


if __name__ == "__main__":
    strategy.build = connect
    sys.exit(entry.main(sys.argv))
