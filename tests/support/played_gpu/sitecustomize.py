"""Takes the place of JAX's real plugins for CUDA, whose libraries are not there, before JAX looks for them."""

from __future__ import annotations

import sys
import types

for _real in ("xla_cuda12", "xla_cuda13"):
    _module = types.ModuleType(_real)
    _module.initialize = lambda: None
    sys.modules[f"jax_plugins.{_real}"] = _module
