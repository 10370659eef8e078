"""Everything of gin that Launcher uses and that is not gin's public API, as found in gin-config 0.5.0.

gin has no public way to ask which names are registered, which bindings were used, or what stands in a file before it
is looked up. gin changes these objects in place, so they may be held.
"""

import functools

import gin

from launcher.errors import UsageError


# Leans on gin: the parser, the registry and the tables of bindings of gin-config 0.5.0 keep their names. Noticed by
# tests/config/test_config_use.py. Then: change this class alone; setup.py admits no later minor version.
class Gin:
    """gin's parser, its reference type and its global tables."""

    def __init__(self) -> None:
        try:
            self.parser = gin.config_parser
            self.reference = gin.config.ConfigurableReference
            self.registry = gin.config._REGISTRY  # complete selector -> Configurable(wrapped, allowlist, denylist, ...)
            self.constants = gin.config._CONSTANTS  # complete name -> value
            self.operative = gin.config._OPERATIVE_CONFIG  # (scope, selector) -> {parameter: value} of the calls so far
            self.imports = gin.config._IMPORTS  # import statements that the operative config repeats
        except AttributeError as error:
            raise UsageError(f"gin-config does not fit Launcher ({error}); pip install 'gin-config==0.5.0'") from None


@functools.cache
def internals() -> Gin:
    """The one `Gin` of the process; UsageError where the installed gin-config lacks something."""
    return Gin()
