"""One training step: gradients, loss scale, clipping, moving statistics, and the trainer that loops over it."""
