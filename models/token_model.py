"""Models from tokens to logits: how they are built, saved and loaded, and how features become logits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from . import products

if TYPE_CHECKING:
    from .transformer.layers import Embedding


class TokenModel(keras.Model):
    """A `keras.Model` whose config, in a `.keras` file, is the arguments of its class and its dtype policy.

    Layers inside it need no config of their own: the class makes them again. Its arguments, "vocab_size" and "width"
    among them, are of types that JSON keeps.
    """

    _width: int

    head: Any = None
    """A dense layer that makes the logits; without it, the matrix of embeddings does."""

    def __new__(cls, **arguments: Any) -> TokenModel:
        model = super().__new__(cls, **arguments)
        # Text: in a dict that is an attribute Keras would look for layers.
        object.__setattr__(model, "_arguments", json.dumps(arguments))
        return model

    @classmethod
    def make(cls, **arguments: Any) -> Any:
        """The model of these arguments, with its weights."""
        model = cls(**arguments)
        model.build()
        return model

    def get_config(self) -> dict[str, Any]:
        policy = self.dtype_policy
        several = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
        dtype = keras.dtype_policies.serialize(policy) if several else policy.name
        return {**json.loads(self._arguments), "dtype": dtype}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> TokenModel:
        """The built model, its layers under the policy that the saved one was made under."""
        arguments, before = dict(config), keras.config.dtype_policy()
        if "tie_head" in arguments:  # as it was called before 1.0
            arguments["tie_embeddings"] = arguments.pop("tie_head")
        keras.config.set_dtype_policy(keras.dtype_policies.get(arguments.pop("dtype")))
        try:
            return cls.make(**arguments)
        finally:
            keras.config.set_dtype_policy(before)

    def build(self, input_shape: Any = None) -> None:
        del input_shape
        for layer in self.layers:
            layer.build((None, None, self._width))
        self.built = True

    def output_matrix(self) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Matrix and bias that make logits of the features of `logits=False`, for a loss that does so, see `products`.

        Returns:
            (matrix [vocab_size, width] in the dtype in which the layer computes, bias float32 [vocab_size] or None).
        """
        if self.head is None:
            embedding = self._output_embedding()
            return tf.cast(tf.convert_to_tensor(embedding.embeddings), embedding.compute_dtype), None
        bias = None if self.head.bias is None else tf.cast(tf.convert_to_tensor(self.head.bias), tf.float32)
        return tf.transpose(tf.cast(tf.convert_to_tensor(self.head.kernel), self.head.compute_dtype)), bias

    def _output_embedding(self) -> Embedding:
        return self.embedding

    def _logits(self, features: tf.Tensor) -> tf.Tensor:
        if self.head is not None and self.head.compute_dtype == "float32":
            return self.head(features)
        matrix, bias = self.output_matrix()
        logits = products.logits(tf.reshape(features, [-1, self._width]), matrix, bias)
        return tf.reshape(logits, [*keras.ops.shape(features)[:-1], matrix.shape[0]])
