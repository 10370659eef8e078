"""Subclassed models that Keras saves and loads by the arguments they were built with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras


class SavedByArguments(keras.Model):
    """A `keras.Model` whose config, in a `.keras` file, is the arguments of its class and its dtype policy.

    Layers inside it need no config of their own: the class makes them again.

    Args:
        arguments: Keyword arguments of the class, of types that JSON keeps.
        name: Name of the model.
    """

    def __init__(self, arguments: Mapping[str, Any], *, name: str) -> None:
        super().__init__(name=name)
        # Text: in a dict that is an attribute Keras would look for layers.
        self._arguments = json.dumps(dict(arguments))

    def get_config(self) -> dict[str, Any]:
        return {**json.loads(self._arguments), "dtype": self.dtype_policy.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SavedByArguments:
        """The built model, its layers under the policy that the saved one was made under."""
        arguments, before = dict(config), keras.config.dtype_policy()
        keras.config.set_dtype_policy(arguments.pop("dtype"))
        try:
            model = cls(**arguments)
        finally:
            keras.config.set_dtype_policy(before)
        model.build()
        return model
