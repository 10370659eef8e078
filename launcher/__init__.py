"""Launcher: one command that trains TensorFlow models on any topology."""

__version__ = "0.1.0"
