"""Compiling the training step for a TPU slice without a TPU, and reporting what the compiler found."""
