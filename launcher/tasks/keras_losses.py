"""Keras's losses, known to gin by the names that Keras gives them: `@keras.losses.Huber()`."""

from __future__ import annotations

import inspect

import gin
import keras

for _name, _loss in vars(keras.losses).items():
    if inspect.isclass(_loss) and issubclass(_loss, keras.losses.Loss) and _name == _loss.__name__ != "Loss":
        gin.external_configurable(_loss, _name, module="keras.losses")
