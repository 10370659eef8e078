"""The worker's side of a supervised job: progress, being asked to stop, drills."""
