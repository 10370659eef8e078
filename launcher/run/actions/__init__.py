"""What a run does at its events beside training: `base.Action`, and those that have a file of their own."""
