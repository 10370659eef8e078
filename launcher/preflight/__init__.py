"""A training step as a program for a pod, and what can be known of it before the pod is rented."""
