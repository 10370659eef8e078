"""Transformers: `transformer` translates, `language_model` continues."""

from models.transformer.decoder import language_model
from models.transformer.encoder_decoder import transformer

__all__ = ["language_model", "transformer"]
