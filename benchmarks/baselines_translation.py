"""BLEU of two translators that learn nothing, on held-out pairs: what a model has to beat clearly. Prints JSON.

    python benchmarks/baselines_translation.py --name=help_en_de

- copy: the source is its own translation.
- nearest neighbour: the translation of the training source that is most like it, by the cosine of TF-IDF weights over
  character 3- and 4-grams within words.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import sacrebleu
from sklearn.feature_extraction.text import TfidfVectorizer

from launcher.data.text.pairs import TextPairs

_BLOCK = 256


def nearest(train: list[str], sources: list[str]) -> np.ndarray:
    """For each of the sources, which of the training sources is most like it."""
    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 4), sublinear_tf=True, dtype=np.float32)
    known = vectorizer.fit_transform(train).T.tocsr()
    asked = vectorizer.transform(sources)
    blocks = [asked[start : start + _BLOCK] @ known for start in range(0, asked.shape[0], _BLOCK)]
    return np.concatenate([np.asarray(block.argmax(axis=1)).ravel() for block in blocks])


def scores(translations: list[str], references: list[str]) -> dict[str, float]:
    """BLEU and chrF in percent, and the share of translations that are exactly right."""
    exact = sum(one == other for one, other in zip(translations, references, strict=True)) / len(references)
    return {
        "bleu": round(sacrebleu.corpus_bleu(translations, [references]).score, 2),
        "chrf": round(sacrebleu.corpus_chrf(translations, [references]).score, 2),
        "exact_match": round(exact, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="help_en_de")
    options = parser.parse_args()
    data = TextPairs(name=options.name, vocab_size=4000, max_length=64)
    data.check()
    train = list(data.source.train())
    sources, references = ([pair[side] for pair in data.eval_pairs] for side in (0, 1))
    neighbours = [train[index][1] for index in nearest([source for source, _ in train], sources)]
    result = {
        "data": options.name,
        "train_pairs": len(train),
        "held_out_pairs": len(sources),
        "bleu_signature": "sacrebleu, tokenizer 13a, exponential smoothing, case as it is",
        "copy": scores(sources, references),
        "nearest_neighbour": scores(neighbours, references),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
