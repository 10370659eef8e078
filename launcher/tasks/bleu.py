"""BLEU as papers report it, by sacrebleu, which is imported when it is needed."""

from __future__ import annotations

import types
from collections.abc import Sequence

from launcher.errors import UsageError
from launcher.machine import installation


def check(binding: str) -> None:
    """Raises UsageError where sacrebleu is missing; `binding` is what needs it."""
    _metrics(binding)


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU (Papineni et al. 2002) of a corpus, 0 to 100, and sacrebleu's signature (Post 2018, arXiv 1804.08771)."""
    measure = _metrics("bleu").BLEU()
    return float(measure.corpus_score(list(translations), [list(references)]).score), str(measure.get_signature())


def _metrics(binding: str) -> types.ModuleType:
    try:
        import sacrebleu.metrics
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sacrebleu":
            raise
        raise UsageError(
            f"{binding} needs sacrebleu, which is not installed: {installation.command('text')}; "
            "translation.decode = 'never' does without"
        ) from None
    return sacrebleu.metrics
