"""Metrics of what a model wrote: corpus scores with signatures, exact match, perplexity."""

from heedful.evaluation.metrics import (
    METRICS,
    Score,
    Scores,
    corpus_scores,
    exact_match,
    perplexity,
    tokenized_lowercase_bleu,
)

__all__ = [
    "METRICS",
    "Score",
    "Scores",
    "corpus_scores",
    "exact_match",
    "perplexity",
    "tokenized_lowercase_bleu",
]
