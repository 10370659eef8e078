"""Data by the name that recipes bind, with arguments of its own and of its source, as bindings give them."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def made(make: Any, name: str, **options: Any) -> Any:
    """What `make`, such as `image_data` or `TextPairs`, makes of a name and of arguments, its source's among them."""
    kind, colon, place = name.partition(":")
    source = vars(sys.modules[make.__module__])["_KINDS"].get(kind + colon)
    taken = inspect.signature(source).parameters.keys() if source else ()
    of_source = {key: options.pop(key) for key in list(options) if key in taken}
    if not of_source:
        return make(name=name, **options)
    return make(source=source(*([place] if colon else []), **of_source), **options)
