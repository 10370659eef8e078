"""A host that another program drives, as the TensorFlow worker on each host of a TPU pod.

python -m remote_host ADDRESS
"""

from __future__ import annotations

import sys

import tensorflow as tf

if __name__ == "__main__":
    server = tf.distribute.Server(tf.train.ClusterSpec({"worker": [sys.argv[1]]}), job_name="worker", task_index=0)
    print("serves", flush=True)
    server.join()
