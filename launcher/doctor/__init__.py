"""Diagnoses of an environment and of what 16 bits do to a model's gradients."""
