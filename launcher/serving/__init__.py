"""Trained models at work: `--mode=predict` and `--mode=export`."""
