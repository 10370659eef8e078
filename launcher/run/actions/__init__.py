"""Actions at a run's events beside training: `base.Action`, and those that have a file of their own."""
