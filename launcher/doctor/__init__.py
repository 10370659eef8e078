"""Doctor: what of this machine, its packages and its peers would stop or slow down a training.

Nothing in this process imports TensorFlow: what only TensorFlow can tell is asked of a process of its own, which may
crash or hang without harm.
"""
