"""A training step as a StableHLO program for any number of replicas, and what runs it."""
