"""The worker's side of a supervised job: progress, and being asked to stop."""
