"""Inspection of nets and of models.

`verify`: checks of a net: causality, padding, cached decoding, gradients and more.
`watch`: attention weights, head outputs and residual states of a net, read and changed.
`attention`, `alignments`, `logit_lens`, `attributions`, `patching`, `search_tree`,
`sampling_steps`, `embedding_map`: what a model does with a text, as arrays and plots.
`layer_scales`: states and gradients by layer; `heedful.run_scales.scales_of_run`: over a training.
`heedful.insight.manual_gradients`: forward and backward passes of the parts, in NumPy.
"""

from heedful.insight.alignment import Alignment, alignment_error_rate, alignments
from heedful.insight.attention_maps import AttentionMap, AttentionMaps, attention
from heedful.insight.attribution import Attributions, attributions
from heedful.insight.checks import Check
from heedful.insight.embeddings import EmbeddingMap, embedding_map
from heedful.insight.logit_lenses import LogitLens, logit_lens
from heedful.insight.patches import Patching, patching
from heedful.insight.report import CheckResult, Report
from heedful.insight.scales import LayerScales, RunScales, layer_scales
from heedful.insight.search_trees import Sampling, SearchTree, sampling_steps, search_tree
from heedful.insight.verification import CHECKS, checks_of, verify
from heedful.insight.watching import Watch, watch

__all__ = [
    "CHECKS",
    "Alignment",
    "AttentionMap",
    "AttentionMaps",
    "Attributions",
    "Check",
    "CheckResult",
    "EmbeddingMap",
    "LayerScales",
    "LogitLens",
    "Patching",
    "Report",
    "RunScales",
    "Sampling",
    "SearchTree",
    "Watch",
    "alignment_error_rate",
    "alignments",
    "attention",
    "attributions",
    "checks_of",
    "embedding_map",
    "layer_scales",
    "logit_lens",
    "patching",
    "sampling_steps",
    "search_tree",
    "verify",
    "watch",
]
