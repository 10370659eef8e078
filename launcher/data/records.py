"""Records of TFRecord files, the user's own or of TFDS, any one of which can be had at once.

A TFRecord file has no index. One pass that reads nothing but the 16 bytes around each record makes it, and it is
kept in the data directory for as long as the files stay as they are. A record is then read by TensorFlow's own reader
from the byte where it begins. So the hosts of a TPU pod, which run no Python, can read it as well, also from gs://, and
its checksum is verified.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
from collections.abc import Sequence
from concurrent import futures

import numpy as np
import tensorflow as tf

from launcher.data import files
from launcher.data.pipeline import ArrayExamples
from launcher.data.text import storage
from launcher.errors import UsageError

# Around the bytes of a record: its length, a checksum of that, and after it one of the bytes.
_HEADER, _FOOTER = 12, 4
_READERS = 16
_KEPT = ("offsets", "lengths", "checksums")  # of each record, in the data directory


@dataclasses.dataclass(frozen=True, eq=False)
class TFRecords:
    """Records of uncompressed TFRecord files: strings of bytes."""

    paths: Sequence[str]
    file: np.ndarray  # int32 [n], which of the paths each stands in
    number: np.ndarray  # int64 [n], of each in its file
    offsets: np.ndarray  # int64 [n], bytes before the header of each
    lengths: np.ndarray  # int64 [n], bytes of each
    checksums: np.ndarray  # uint32 [n], of the bytes of each

    @classmethod
    def open(cls, paths: Sequence[str]) -> TFRecords:
        """Reads the headers of all records, or what is known of them since they were read.

        Raises:
          UsageError: a file is truncated, damaged, compressed or none of TFRecords, or there are no records at all.
        """
        version = storage.digest("with checksums", *(f"{path} {files.version(path)}" for path in paths))
        index, _ = storage.stored_rows(storage.folder("records") / version, lambda: (_index(paths), {}))
        counts = index["counts"]
        file = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        number = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        return cls(paths, file, number, *(index[key] for key in _KEPT))

    def __len__(self) -> int:
        return len(self.file)

    def name(self, index: int) -> str:
        return f"record {self.number[index]} of {self.paths[self.file[index]]}"

    def key(self, index: int) -> str:
        """A name that stays when the files are moved to another folder."""
        return f"{os.path.basename(self.paths[self.file[index]])}#{self.number[index]}"

    def firsts(self) -> list[int]:
        """The first record of each file."""
        return np.unique(self.file, return_index=True)[1].tolist()

    def identity(self) -> str:
        """A digest of the files' names and of the checksums in them."""
        sums = np.asarray(self.checksums)
        return storage.digest(*map(os.path.basename, self.paths), self.file, self.number, sums)

    @functools.cached_property
    def _places(self) -> ArrayExamples:
        return ArrayExamples({"file": self.file, "offset": self.offsets, "length": self.lengths})

    def fetch(self, indices: tf.Tensor) -> tf.Tensor:
        """Records `indices` (int64 [n]), string [n]; runs inside `tf.data.Dataset.map`."""
        chosen = self._places.fetch(indices)
        places = tf.gather(self.paths, chosen["file"]), chosen["offset"], chosen["length"]
        return tf.map_fn(_record_at, places, fn_output_signature=tf.TensorSpec([], tf.string))

    def read(self, index: int) -> bytes:
        """One record, read by Python."""
        with files.opened(self.paths[self.file[index]]) as file:
            file.seek(int(self.offsets[index]) + _HEADER)
            return file.read(int(self.lengths[index]))

    def select(self, chosen: np.ndarray) -> TFRecords:
        """Some of them, by their indices."""
        of_each = ("file", "number", *_KEPT)
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in of_each})


def _record_at(place: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
    path, offset, length = place
    # The class tf.data.TFRecordDataset starts at the beginning of a file; this is the operation under it.
    # Leans on TensorFlow: TFRecordDatasetV2 starts at `byte_offsets`. Noticed by tests/data/test_own_images.py. Then:
    # look for another public operation that seeks; records then lose random access.
    dataset = tf.raw_ops.TFRecordDatasetV2(
        filenames=path[tf.newaxis],
        compression_type="",
        buffer_size=length + _HEADER + _FOOTER,
        byte_offsets=offset[tf.newaxis],
    )
    records = tf.data.experimental.from_variant(dataset, tf.TensorSpec([], tf.string))
    return records.take(1).get_single_element()


def _index(paths: Sequence[str]) -> dict[str, np.ndarray]:
    with futures.ThreadPoolExecutor(_READERS) as pool:
        parts = list(pool.map(_headers, paths))
    counts = [len(offsets) for offsets, *_ in parts]
    if not any(counts):
        raise UsageError(f"{paths[0]} and {len(paths) - 1} more files hold no record")
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"counts": np.array(counts), **dict(zip(_KEPT, columns, strict=True))}


def _headers(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The place of each record of a file, its length, and the checksum behind it."""
    size, place = files.version(path)[0], 0
    offsets: list[int] = []
    lengths: list[int] = []
    footers: list[bytes] = []
    with files.opened(path) as file:
        while place < size:
            before = min(place, _FOOTER)  # bytes of the footer of the record before, if there is one
            file.seek(place - before)
            content = file.read(before + _HEADER)
            # What a header that is cut lacks makes its record longer than any file.
            length = struct.unpack("<Q", content[before:].ljust(_HEADER, b"\xff")[:8])[0]
            offsets.append(place)
            lengths.append(length)
            footers.append(content[:before])
            place += _HEADER + length + _FOOTER
            if content.startswith(b"\x1f\x8b"):
                raise UsageError(f"{path} is compressed, so that no record can be had at once; decompress it")
            if place > size:
                raise UsageError(
                    f"{path} is truncated, damaged or no TFRecord file: its record {len(offsets) - 1} begins at byte "
                    f"{offsets[-1]:,} and would end at byte {place:,}, and the file ends at byte {size:,}; make or "
                    "fetch it again"
                )
        file.seek(max(size - _FOOTER, 0))
        footers.append(file.read(_FOOTER))
    return np.array(offsets, np.int64), np.array(lengths, np.int64), np.frombuffer(b"".join(footers), "<u4")
