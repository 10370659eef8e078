"""Programs written as HLO's text, read as preflight reads the dumps of them."""

from __future__ import annotations

from jaxlib import _hlo

from launcher.preflight.compiled import hlo, hlo_protos


def dump(text: str) -> str:
    """What XLA would dump of a program."""
    proto = hlo_protos.HloProto()
    proto.hlo_module.ParseFromString(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    return proto.SerializeToString().decode("latin-1")


def parse(text: str) -> hlo.Module:
    """The program as it is read from its dump."""
    return hlo.parse(dump(text))


def array(text: str) -> hlo.Array:
    """The array of a shape's text."""
    (found,) = parse(f"HloModule m\n\nENTRY e {{\n  ROOT p = {text} parameter(0)\n}}\n").entry.root.shapes
    return found
