"""Text to packed rows of tokens, and those to batches, beside `datasets` and Grain with `tokenizers`. Prints JSON.

    PEER_PYTHON=/path/to/venv/bin/python python benchmarks/text_rows.py --rounds=3

The peers need datasets, grain and tokenizers. All read the same paragraphs of the standard library's
sources, make rows of 1,024 tokens and give them out in batches of 32, in one process and one thread. Launcher encodes
by its vocabulary of 8,000, the peers by a byte-level one of that size (as GPT-2's), trained on the same texts before
the clock begins: what is compared is the same text, and tokens stand beside. Launcher's "again" is a later pass over
rows that are kept, in which Grain tokenizes anew. Ratios are a peer's processor seconds divided by Launcher's in the
same round: above 1, Launcher is faster.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, BATCH, VOCABULARY = 1024, 32, 8000
SIDES = ("launcher", "datasets", "grain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(globals()[f"_{options.side}"](Path(options.folder))))
        return
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "texts.json").write_text(json.dumps(_texts()))
        for _ in range(options.rounds):
            rounds.append({side: _run(side, folder) for side in SIDES})
    from measuring import spread

    result: dict[str, Any] = {"bytes": sum(len(text.encode()) for text in _texts())}
    for side in SIDES:
        each = [one[side] for one in rounds]
        result[side] = {key: spread([one[key] for one in each]) for key in each[0]}
        result[side]["ratio"] = spread([one[side]["processor"] / one["launcher"]["processor"] for one in rounds])
    print(json.dumps(result, indent=2))


def _run(side: str, folder: str) -> dict[str, float]:
    python = sys.executable if side == "launcher" else os.environ["PEER_PYTHON"]
    one = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [python, __file__, f"--side={side}", f"--folder={folder}"]
    done = subprocess.run(command, env={**os.environ, **one}, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _texts() -> list[str]:
    sources = sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/*.py"))
    whole = (Path(path).read_text(errors="replace") for path in sources)
    return [part for text in whole for part in text.split("\n\n") if part.strip()]


class _Clock:
    def __init__(self) -> None:
        self.begun, self.used = time.perf_counter(), time.process_time()

    def read(self, tokens: int) -> dict[str, float]:
        used = time.process_time() - self.used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "processor": used, "seconds": time.perf_counter() - self.begun, "tokens_a_second": tokens / used,
            "peak_mib": peak,
        }  # fmt: skip


def _launcher(folder: Path) -> dict[str, float]:
    import tensorflow as tf

    from launcher.data.pipeline import Shard
    from launcher.data.text.corpus import TextCorpus

    texts = json.loads((folder / "texts.json").read_text())

    class Source:
        name = "texts"

        def check(self) -> None: ...

        def digest(self) -> str:
            return str(os.getpid())

        def train(self):
            return iter(texts)

        def held_out(self):
            return iter(())

    os.environ["TFDS_DATA_DIR"] = str(folder)
    data = TextCorpus(Source(), vocab_size=VOCABULARY, length=LENGTH)
    data.check()
    _ = data.vocabulary.size, tf.constant(0)
    shard = Shard(global_batch_size=BATCH, seed=0)

    def epoch() -> int:
        batches = iter(data.train_batches(shard))
        count = data.num_train_examples // BATCH
        return sum(int((next(batches)["tokens"].numpy() != 0).sum()) for _ in range(count))

    clock = _Clock()
    first = clock.read(epoch())
    clock = _Clock()
    again = clock.read(epoch())
    return {**first, **{f"again_{key}": again[key] for key in ("processor", "tokens_a_second")}}


def _tokenizer(texts: list[str]):
    import tokenizers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False)
    return made._tokenizer


def _datasets(folder: Path) -> dict[str, float]:
    import datasets
    import numpy as np

    texts = json.loads((folder / "texts.json").read_text())
    tokenizer = _tokenizer(texts)
    datasets.disable_progress_bars()

    def encoded(block: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [[*one.ids, 0] for one in tokenizer.encode_batch_fast(block["text"])]}

    def grouped(block: dict[str, Any]) -> dict[str, Any]:
        flat = np.concatenate(block["ids"])
        return {"ids": flat[: len(flat) // LENGTH * LENGTH].reshape(-1, LENGTH)}

    clock, tokens = _Clock(), 0
    stream = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
    stream = stream.map(encoded, batched=True, batch_size=1000, remove_columns=["text"])
    stream = stream.map(grouped, batched=True, batch_size=1000).with_format("numpy")
    for batch in stream.batch(BATCH, drop_last_batch=True):
        tokens += batch["ids"].size
    return clock.read(tokens)


def _grain(folder: Path) -> dict[str, float]:
    import grain
    import numpy as np

    texts = json.loads((folder / "texts.json").read_text())
    tokenizer = _tokenizer(texts)
    clock, tokens = _Clock(), 0
    stream = (
        grain.MapDataset.source(texts)
        .shuffle(seed=0)
        .map(lambda text: {"ids": np.array([*tokenizer.encode(text).ids, 0], np.int32)})
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16))
    )
    packed = grain.experimental.ConcatThenSplitIterDataset(stream, length_struct={"ids": LENGTH})
    for batch in packed.batch(BATCH, drop_remainder=True):
        tokens += batch["ids"].size
    return clock.read(tokens)


if __name__ == "__main__":
    main()
