"""XLA's protocol messages, from TensorFlow's own wheels, which have them at a private place, and what they do not know.

Tried with TensorFlow 2.16.2, 2.18.1 and 2.21.0, and dumps of jaxlib 0.10.2 and 0.12.0 and libtpu 0.0.52.
"""

from collections.abc import Iterator

from google.protobuf.message import Message

from launcher.errors import UsageError

try:
    # Leans on TensorFlow: it keeps these modules at this place. Noticed by tests/test_compiler_dumps.py. Then: look for
    # them in the new wheel; preflight needs them.
    from google.protobuf.unknown_fields import UnknownFieldSet
    from tensorflow.compiler.xla import xla_data_pb2
    from tensorflow.compiler.xla.service import hlo_pb2
except ImportError as error:
    raise UsageError(
        f"--mode=preflight reads programs with modules of TensorFlow and protobuf that these do not have ({error}); "
        "it was tried with TensorFlow 2.16.2, 2.18.1 and 2.21.0"
    ) from None

# What is newer than the oldest of these wheels and changes nothing of what is counted. Of an instruction: ends of
# top-k, statistics, devices of collectives in other forms, values' origins, accuracies, ways of scanning, kinds of
# convolution, orders of comparisons. Of memory: which values are one buffer, which its allocations say too.
_HARMLESS = {"HloInstructionProto": {82, *range(85, 99), 101, 102}, "BufferAssignmentProto": {5}}
_NOT_READ = {"metadata", "sharding", "frontend_attributes", "literal", "original_value", "statistics_viz"}


def unknown(message: Message) -> Iterator[str]:
    """Fields with a value that these classes do not know, and that may matter: "field 99 of HloInstructionProto"."""
    kind = message.DESCRIPTOR.name
    for one in UnknownFieldSet(message):
        if one.data and one.field_number not in _HARMLESS.get(kind, ()):
            yield f"field {one.field_number} of {kind}"
    for field, value in message.ListFields():
        if field.message_type is not None and field.name not in _NOT_READ:
            for one in [value] if isinstance(value, Message) else value:
                yield from unknown(one)


def dtype(element_type: int) -> str:
    """HLO's name, such as "bf16"; of a type that these classes do not know, its number."""
    known = xla_data_pb2.PrimitiveType.DESCRIPTOR.values_by_number.get(element_type)
    return known.name.lower() if known else str(element_type)


HloProto = hlo_pb2.HloProto
HloInstructionProto = hlo_pb2.HloInstructionProto
ShapeProto = xla_data_pb2.ShapeProto
TUPLE = xla_data_pb2.TUPLE
HIGHEST = xla_data_pb2.PrecisionConfig.HIGHEST
