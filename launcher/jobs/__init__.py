"""Starts, watches and restarts the workers of one job. Imports no TensorFlow and outlives a crashed runtime."""
