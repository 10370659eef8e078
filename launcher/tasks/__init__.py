"""Tasks: a model with its data, loss and metrics."""
