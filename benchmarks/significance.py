"""Confidence intervals and paired bootstrap tests of corpus scores (Koehn 2004), by sacreBLEU."""

from collections.abc import Mapping, Sequence
from typing import Any

import sacrebleu
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from sacremoses import MosesTokenizer

SAMPLES = 1_000  # bootstrap resamples; sacreBLEU's seed is fixed (SACREBLEU_SEED, 12345)
NOTE = (
    f"± is half of the 95% confidence interval over {SAMPLES:,} bootstrap resamples of the "
    "sentences, p the result of the paired bootstrap test (Koehn 2004), both by sacreBLEU."
)
Results = dict[str, dict[str, dict[str, float | None]]]


def significance(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    language: str,
    lowercase: bool = False,
) -> Results:
    """Scores of systems on the same sentences, with intervals and a test against the first.

    Args:
        systems: output lines by the system's name. The first system is the baseline.
        references: one line for each output line.
        language: code of the target language, for tokenization.
        lowercase: ignore case, as sacreBLEU's option does.

    Returns:
        For each metric and system: `score`, `interval` (half of the 95% confidence interval) and
        `p_value` (paired bootstrap against the baseline; None for the baseline).
    """
    results = {
        "bleu": _compare(
            systems, sacrebleu.BLEU(trg_lang=language, lowercase=lowercase), references
        ),
        "chrf": _compare(systems, sacrebleu.CHRF(lowercase=lowercase), references),
    }
    if language != "zh":  # Moses' rules need spaces between words
        tokenizer = MosesTokenizer(language)

        def tokenize(lines: Sequence[str]) -> list[str]:
            lowered = [line.lower() for line in lines]
            return [tokenizer.tokenize(line, return_str=True, escape=False) for line in lowered]

        tokenized = {name: tokenize(lines) for name, lines in systems.items()}
        metric = sacrebleu.BLEU(tokenize="none", force=True, smooth_method="none")
        results["tokenized_lowercase_bleu"] = _compare(tokenized, metric, tokenize(references))
    return results


def _compare(
    systems: Mapping[str, Sequence[str]], metric: Metric, references: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    named = [(name, list(lines)) for name, lines in systems.items()]
    test = PairedTest(named, {"metric": metric}, [list(references)], "bs", SAMPLES)
    _, columns = test()
    del columns["System"]
    (results,) = columns.values()
    return {
        name: {"score": float(one.score), "interval": float(one.ci), "p_value": one.p_value}
        for name, one in zip(systems, results, strict=True)
    }


def interval_text(result: Mapping[str, Any]) -> str:
    """For instance "39.10 ± 1.21"."""
    return f"{result['score']:.2f} ± {result['interval']:.2f}"


def p_text(p_value: float | None) -> str:
    """A p-value with three digits; a dash for the baseline."""
    return "–" if p_value is None else f"{p_value:.3f}"
