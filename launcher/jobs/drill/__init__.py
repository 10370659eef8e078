"""Drills: a job that is made to fail on purpose, and the report on its recovery."""
