"""The first and last bytes of an image file: they tell whether it is one, whole, and how large the image is.

Nothing is decoded. A file that passes may still hold damage that only its decoder finds. Imports no TensorFlow.
"""

import os
import struct
from typing import IO

from launcher.errors import UsageError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
"""Ends of names of files in formats that TensorFlow decodes."""

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"

# JPEG (ITU-T T.81, table B.1): start of image, start of scan, end of image; frame headers, which hold the size.
_SOI, _SOS, _EOI = b"\xff\xd8", 0xDA, b"\xff\xd9"
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}

GREYS = b"".join(bytes((grey, grey, grey, 0)) for grey in range(256))
"""The palette of a grey BMP: an index is its colour."""
PALETTE = "BMP with a palette of colours, whose numbers TensorFlow takes for greys: store it as PNG"


def check(file: IO[bytes]) -> None:
    """Raises UsageError unless the file begins and ends as an image of its format does."""
    start = _start(file)
    if start.startswith(b"BM"):
        _check_bmp(file, start)
        return
    is_jpeg = start.startswith(_SOI)
    kind, end = ("JPEG", _EOI) if is_jpeg else ("PNG", _PNG_END) if start.startswith(_PNG) else ("GIF", b"")
    if last_bytes(file, len(end)) == end:
        return
    # Cameras append data of their own. A thumbnail has an end of its own, in a segment before the image.
    file.seek(0)
    has_pixels = not is_jpeg or any(marker == _SOS for marker, _ in _jpeg_segments(file))
    if not has_pixels or end not in file.read():
        raise UsageError(f"truncated {kind}")


def size(file: IO[bytes]) -> tuple[int, int]:
    """Height and width in pixels; raises UsageError where it is no image, or ends before it says."""
    start = _start(file)
    try:
        if start.startswith(_SOI):
            for marker, content in _jpeg_segments(file):
                if marker in _FRAMES:
                    return struct.unpack_from(">HH", content, 1)
            raise UsageError("truncated JPEG")
        if start.startswith(_PNG):
            width, height = struct.unpack_from(">II", start, 16)
        elif start.startswith(b"BM"):
            width, height = struct.unpack_from("<ii", start, 18)
        else:
            width, height = struct.unpack_from("<HH", start, 6)
    except struct.error:
        raise UsageError("truncated") from None
    return abs(height), width  # a BMP whose rows run downwards has a negative height


def _start(file: IO[bytes]) -> bytes:
    file.seek(0)
    start = file.read(32)
    if not start:
        raise UsageError("empty")
    if not start.startswith((_SOI + b"\xff", _PNG, b"GIF87a", b"GIF89a", b"BM")):
        is_webp = start.startswith(b"RIFF") and start[8:12] == b"WEBP"
        raise UsageError("WebP: store it as PNG or JPEG" if is_webp else "not JPEG, PNG, GIF or BMP")
    return start


def _jpeg_segments(file: IO[bytes]) -> list[tuple[int, bytes]]:
    """Markers and contents up to the start of the scan, after which the file stands; less where the file ends."""
    file.seek(2)
    segments: list[tuple[int, bytes]] = []
    while not segments or segments[-1][0] != _SOS:
        header = file.read(4)
        while header[:2] == b"\xff\xff":  # fill bytes
            header = header[1:] + file.read(1)
        if len(header) < 4 or header[0] != 0xFF:
            break
        length = struct.unpack(">H", header[2:])[0] - 2
        segments.append((header[1], file.read(length)))
    return segments


def _check_bmp(file: IO[bytes], start: bytes) -> None:
    if len(start) < 32:
        raise UsageError("truncated BMP")
    pixels, header, bits = struct.unpack_from("<I", start, 10)[0], start[14], start[28]
    file.seek(14 + header)
    if bits == 8 and not GREYS.startswith(file.read(pixels - 14 - header)):
        raise UsageError(PALETTE)


def last_bytes(file: IO[bytes], count: int) -> bytes:
    """So many bytes at the end of a file, or all that there are."""
    file.seek(0, os.SEEK_END)
    file.seek(max(file.tell() - count, 0))
    return file.read(count)
