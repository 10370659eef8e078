"""Transformers: `transformer` translates, `language_model` continues."""

from models.transformer.decoder import language_model
from models.transformer.dimensions import dimension_notes
from models.transformer.encoder_decoder import transformer

__all__ = ["dimension_notes", "language_model", "transformer"]
