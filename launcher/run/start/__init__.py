"""The starting point of a run: a checkpoint, stored weights, or the chief's over the network."""
