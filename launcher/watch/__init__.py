"""Gradients looked at while a model trains: taps between layers, exponents, what float16 would lose."""
