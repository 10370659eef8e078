"""Data sets as batches whose content depends on (seed, step) alone."""
