"""Where a run goes on from: a checkpoint, stored weights, or the chief's over the network."""
