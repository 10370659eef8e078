"""Verification on a recipe that the topology does not change what is trained: `--mode=verify`."""
