"""The machine: who its peers are, which devices it has, the strategy over them, TensorFlow itself."""
