"""Bits per byte that gzip and xz need for held-out text when they may see the training text first. Prints JSON.

    python benchmarks/compressors.py
    python benchmarks/compressors.py --train_file=a.txt --eval_file=b.txt

What a language model on the same text has to beat. The size of the held-out text is that of both texts together less
that of the training text alone. The window of xz, 64 MiB at -9, holds all of a text of this size. That of gzip is
32 KiB: of the training text it sees no more than the end.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
from collections.abc import Callable

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.patterns import LinesCorpus
from launcher.gin_configs.data.python_docs import PythonDocs

_XZ_WINDOW_BYTES = 64 << 20


def gzip_9(data: bytes) -> int:
    """Bytes of `gzip -9`."""
    return len(gzip.compress(data, compresslevel=9, mtime=0))


def xz_9(data: bytes) -> int:
    """Bytes of `xz -9e`."""
    if len(data) > _XZ_WINDOW_BYTES:
        raise SystemExit(f"error: {len(data)} bytes do not fit the {_XZ_WINDOW_BYTES} of xz's window; give less text")
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def bits_per_byte(size: Callable[[bytes], int], train: bytes, held_out: bytes) -> dict[str, float]:
    """Of the held-out text after the training text, and of the held-out text alone."""
    after = size(train + held_out) - size(train)
    alone = size(held_out)
    return {
        "after_the_training_text": round(8 * after / len(held_out), 4),
        "alone": round(8 * alone / len(held_out), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_file")
    parser.add_argument("--eval_file")
    options = parser.parse_args()
    own = LinesCorpus(options.train_file, eval_files=options.eval_file) if options.train_file else PythonDocs()
    data = TextCorpus(own, vocab_size=4000, length=256)
    data.check()
    train, held_out = ("".join(texts).encode() for texts in (data.source.train(), data.source.held_out()))
    result = {
        "data": data.name,
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "bits_per_byte": {
            "gzip -9 (window 32 KiB)": bits_per_byte(gzip_9, train, held_out),
            "xz -9e (window 64 MiB)": bits_per_byte(xz_9, train, held_out),
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
