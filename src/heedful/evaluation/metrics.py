"""Corpus scores of output lines against reference lines, each with the signature it was made under.

sacreBLEU and sacremoses are imported when a score is asked for: both are slow to import.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from heedful import plugins
from heedful.errors import UserError
from heedful.plugins import Metric

DEFAULT_METRICS = ("bleu", "chrf", "ter", "exact_match")


@dataclass(frozen=True)
class Score:
    """One score of one corpus.

    `value` is on the metric's own scale: BLEU and chrF 0 to 100, TER 0 (best) upwards, exact
    match a share from 0 to 1. `signature` says how the value was made, so that two values may be
    compared only when it is the same. `details` holds counts that explain the value.
    """

    name: str
    value: float
    signature: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """The scores of one corpus of `num_segments` lines, by the metrics' names."""

    num_segments: int
    by_metric: dict[str, Score]

    def __getitem__(self, metric: str) -> Score:
        return self.by_metric[metric]

    def values(self) -> dict[str, float]:
        """Metric name to value alone."""
        return {metric: score.value for metric, score in self.by_metric.items()}

    def to_dict(self) -> dict[str, Any]:
        """`{"num_segments": n, "scores": {metric: {"name": ...}}}` with details, ready for JSON."""
        scores = {
            metric: {"name": one.name, "score": one.value, "signature": one.signature} | one.details
            for metric, one in self.by_metric.items()
        }
        return {"num_segments": self.num_segments, "scores": scores}


def corpus_scores(
    hypotheses: list[str],
    references: list[str],
    *,
    trg_lang: str | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    lowercase: bool = False,
) -> Scores:
    """Scores lines of output against one reference line each.

    `trg_lang` is the language code of the lines ("de", "zh-CN"). It chooses BLEU's tokenisation
    (sacreBLEU's rule: zh, ja-mecab, ko-mecab, otherwise 13a), makes TER
    count characters in Chinese and Japanese, which put no spaces between words, and is needed for
    `tokenized_lowercase_bleu`. BLEU, chrF, TER and their signatures are sacreBLEU's (Post 2018).
    `lowercase` forgives capitals, as sacreBLEU's option does: for models that write none.

    Raises `UserError`: unequal numbers of lines, no lines, an unknown metric.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"scores: {len(hypotheses)} lines of output but {len(references)} reference lines;"
            " give one reference line for each line of output"
        )
    if not references:
        raise UserError("scores: no lines to score; give at least one line and its reference")
    language = _language(trg_lang)
    # An unknown name is an error before any work.
    functions = {name: plugins.metric.get(name).function for name in metrics}
    if lowercase:
        hypotheses, references = ([line.lower() for line in s] for s in (hypotheses, references))
    found = {
        name: function(hypotheses, references, language=language)
        for name, function in functions.items()
    }
    if lowercase:
        found = {
            name: replace(one, signature=one.signature.replace("case:mixed", "case:lc"))
            for name, one in found.items()
        }
    return Scores(len(hypotheses), found)


def exact_match(hypotheses: list[str], references: list[str], **_: object) -> Score:
    """The share (0 to 1) of lines equal to their reference, character for character.

    Before comparing, runs of white space become one space and the ends are stripped; nothing else
    is forgiven: case, punctuation and Unicode form all count.
    """
    pairs = zip(hypotheses, references, strict=True)
    num_equal = sum(output.split() == reference.split() for output, reference in pairs)
    details = {"num_equal": num_equal, "num_segments": len(references)}
    signature = "case:mixed|space:normalised"
    return Score("exact match", num_equal / len(references), signature, details)


def sentence_chrf(hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF2 of each line by itself, 0 to 100: to find the worst, not to compare systems by."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    pairs = zip(hypotheses, references, strict=True)
    return [metric.sentence_score(output, [reference]).score for output, reference in pairs]


def tokenized_lowercase_bleu(hypotheses: list[str], references: list[str], language: str) -> Score:
    """BLEU-4 on lowercased, Moses-tokenised text: "BLEU" in many papers' tables (Multi30k).

    Lines are lowercased, then tokenised by Moses' rules for `language`, then counted as
    multi-bleu.perl does: corpus n-gram precisions, no smoothing (0 when an order has no match).
    Tokens stay unescaped ("'", not "&apos;"): escaping renames tokens one to one, so that the
    counts are the same. Punctuation is not normalised. Not comparable with sacreBLEU's value, which
    is made on another tokenisation and keeps case.

    Raises `UserError` for a missing `language` or one that puts no spaces between words: Moses'
    rules would leave whole clauses as single tokens there.
    """
    if not language:
        raise UserError("tokenized_lowercase_bleu: needs the target language; give its code ('de')")
    if language in ("zh", "ja", "th", "km", "lo", "my"):
        raise UserError(
            f"tokenized_lowercase_bleu: {language!r} puts no spaces between words;"
            " use 'bleu' or 'chrf'"
        )
    from sacrebleu import __version__
    from sacrebleu.metrics.bleu import BLEU
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(language)

    def prepare(lines: list[str]) -> list[str]:
        return [tokenizer.tokenize(line.lower(), return_str=True, escape=False) for line in lines]

    counter = BLEU(tokenize="none", force=True, smooth_method="none")
    result = counter.corpus_score(prepare(hypotheses), [prepare(references)])
    signature = f"nrefs:1|case:lc|tok:moses-{language}|smooth:none|count:sacrebleu-{__version__}"
    return Score("tokenised lowercased BLEU", result.score, signature, _bleu_details(result))


def perplexity(nll_sum: float | int, count: int) -> float:
    """exp(nll_sum / count): `nll_sum` in nats over `count` target tokens; inf when it overflows.

    The likelihood is that of the target alone: a label-smoothed loss gives no perplexity.

    Raises `UserError` when there are no tokens.
    """
    if count <= 0:
        raise UserError("no target tokens to count; give at least one line of target text")
    try:
        return math.exp(nll_sum / count)
    except OverflowError:
        return math.inf


def _bleu(hypotheses: list[str], references: list[str], language: str) -> Score:
    from sacrebleu.metrics.bleu import BLEU

    try:
        metric = BLEU(trg_lang=language)
    except RuntimeError as error:  # the tokeniser's own package is missing
        raise UserError(
            f"bleu: this tokenisation needs a package that is not installed;"
            f" pip install 'sacrebleu[{language}]', or choose the metric chrf"
        ) from error
    result = metric.corpus_score(hypotheses, [references])
    return Score("BLEU", result.score, str(metric.get_signature()), _bleu_details(result))


def _bleu_details(result: Any) -> dict[str, Any]:
    return {
        "precisions": [float(precision) for precision in result.precisions],
        "brevity_penalty": float(result.bp),
        "hypothesis_length": int(result.sys_len),
        "reference_length": int(result.ref_len),
    }


def _chrf(hypotheses: list[str], references: list[str], word_order: int = 0, **_: object) -> Score:
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF(word_order=word_order)
    result = metric.corpus_score(hypotheses, [references])
    return Score(result.name, result.score, str(metric.get_signature()))


def _ter(hypotheses: list[str], references: list[str], language: str) -> Score:
    from sacrebleu.metrics.ter import TER

    by_character = language in ("zh", "ja")
    metric = TER(normalized=by_character, asian_support=by_character)
    result = metric.corpus_score(hypotheses, [references])
    details = {"num_edits": int(result.num_edits), "reference_length": int(result.ref_length)}
    return Score("TER", result.score, str(metric.get_signature()), details)


def _language(code: str | None) -> str:
    """The primary subtag: "zh-CN", "zh_Hans" and "cmn" are "zh"; none is ""."""
    primary = (code or "").replace("_", "-").split("-")[0].lower()
    return {"cmn": "zh", "zho": "zh", "jpn": "ja", "kor": "ko"}.get(primary, primary)


# The function of a metric is (output lines, reference lines, language) -> Score.
plugins.metric.declare(
    {
        "bleu": Metric(_bleu, higher_is_better=True),
        "chrf": Metric(_chrf, higher_is_better=True),
        "chrf++": Metric(partial(_chrf, word_order=2), higher_is_better=True),
        "ter": Metric(_ter, higher_is_better=False),
        "exact_match": Metric(exact_match, higher_is_better=True),
        "tokenized_lowercase_bleu": Metric(tokenized_lowercase_bleu, higher_is_better=True),
    }
)
