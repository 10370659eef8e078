"""`--mode=precision_report`: what 16 bits would do to the gradients of this model."""
