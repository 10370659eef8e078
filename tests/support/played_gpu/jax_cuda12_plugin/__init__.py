"""The name alone, by which Launcher sees that JAX has CUDA."""
