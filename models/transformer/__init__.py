"""Transformers: `transformer` translates, `language_model` continues."""

from .decoder import language_model
from .encoder_decoder import transformer

__all__ = ["language_model", "transformer"]
