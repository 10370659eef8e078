"""Drills: a job that is made to fail on purpose, and the verdict on its recovery."""
