"""Where float16 overflows, underflows and rounds, beside bfloat16 and float32, computed by TensorFlow. Prints JSON.

python benchmarks/float16_limits.py
"""

from __future__ import annotations

import json
import os

DTYPES = ("float16", "bfloat16", "float32")


def limits() -> dict[str, dict[str, float]]:
    """Results of small computations by what is computed and by dtype; both operands and the result have the dtype.

    The first two are those of https://www.tensorflow.org/guide/mixed_precision.
    """
    import tensorflow as tf

    rows = {
        "256 ** 2": lambda dtype: tf.constant(256.0, dtype) ** 2,
        "1e-5 ** 2": lambda dtype: tf.constant(1e-5, dtype) ** 2,
        "65504": lambda dtype: tf.cast(65504.0, dtype),
        "65520": lambda dtype: tf.cast(65520.0, dtype),
        "2^-14 (smallest normal float16)": lambda dtype: tf.cast(2.0**-14, dtype),
        "2^-24 (smallest subnormal float16)": lambda dtype: tf.cast(2.0**-24, dtype),
        "2^-25": lambda dtype: tf.cast(2.0**-25, dtype),
        "1.001 * 2^-25": lambda dtype: tf.cast(1.001 * 2.0**-25, dtype),
        "1 + 2^-7": lambda dtype: tf.constant(1.0, dtype) + tf.constant(2.0**-7, dtype),
        "1 + 2^-10": lambda dtype: tf.constant(1.0, dtype) + tf.constant(2.0**-10, dtype),
        "1 + 2^-12": lambda dtype: tf.constant(1.0, dtype) + tf.constant(2.0**-12, dtype),
        "0.1": lambda dtype: tf.cast(0.1, dtype),
    }
    return {name: {dtype: float(compute(dtype)) for dtype in DTYPES} for name, compute in rows.items()}


def added_up(steps: int = 4096, update: float = 2.0**-12) -> dict[str, float]:
    """A weight of 1 after `steps` additions of `update`, kept in each dtype; exactly it is 1 + steps * update."""
    import tensorflow as tf

    found = {}
    for dtype in DTYPES:
        weight = tf.Variable(1.0, dtype=dtype)
        for _ in range(steps):
            weight.assign_add(tf.cast(update, dtype))
        found[dtype] = float(weight)
    return found


def main() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    shown = {name: {dtype: repr(value) for dtype, value in row.items()} for name, row in limits().items()}
    shown["1 after 4096 updates of 2^-12"] = {dtype: repr(value) for dtype, value in added_up().items()}
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
