"""`verify`: run all checks on a copy of a net."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from heedful import openmp
from heedful.errors import UserError, describe
from heedful.insight import cache_checks as cache
from heedful.insight import call_checks as calls
from heedful.insight import causality, hugging_face
from heedful.insight import dependency_checks as dependency
from heedful.insight import learning_checks as learning
from heedful.insight import padding_checks as padding
from heedful.insight.checks import Check
from heedful.insight.kind import (
    LENGTHS,
    SIZES,
    NetKind,
    Outputs,
    Side,
    Stacks,
    infer_kind,
    parameters_of,
)
from heedful.insight.probe import Call, Probe
from heedful.insight.report import CheckResult, Report

_HALVES = (torch.float16, torch.bfloat16)


# In the order in which they run and are reported: each after those that it needs.
CHECKS = (
    calls.stateless,
    calls.output_shape,
    calls.one_row_one_token,
    calls.deterministic,
    calls.normalization,
    causality.causality,
    dependency.mask_polarity,
    dependency.bidirectional_attention,
    dependency.attention_window,
    dependency.position_awareness,
    dependency.batch_independence,
    *padding.source_padding,
    *padding.target_padding,
    *padding.text_padding,
    padding.empty_rows,
    cache.cached_decoding,
    learning.gradient_flow,
    padding.padding_gradient,
    learning.weight_tying,
    learning.bf16,
    learning.initial_loss,
    learning.one_batch_overfits,
)


def checks_of(*, single_stack: bool) -> list[Check]:
    """The checks for nets with one stack or two, in the order of `CHECKS`.

    >>> [check.name for check in checks_of(single_stack=True)][:2]
    ['no state between calls', 'output shape']
    """
    return [check for check in CHECKS if check.stacks != (2 if single_stack else 1)]


def verify(
    net: nn.Module,
    *,
    stacks: Stacks | None = None,
    causal: bool | None = None,
    outputs: Outputs | None = None,
    vocab_size: int | None = None,
    src_vocab_size: int | None = None,
    tgt_vocab_size: int | None = None,
    pad_id: int | None = None,
    left_padding: bool | None = None,
    max_distance: int | None = None,
    call: Call | None = None,
    length: int = 10,
    long_length: int = 160,
    tolerance: float | None = None,
    fresh: bool = True,
    overfit: bool = True,
    overfit_seconds: float = 60.0,
    seed: int = 0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Check that a module is a correct Transformer.

    Supported are encoder-decoders, `(src (B, S), tgt (B, T)) -> logits (B, T, V)`, decoders,
    `(ids (B, T)) -> logits (B, T, V)`, and encoders, which may also return states (B, T, D), or
    logits of classes or vectors (B, C), of any library. Nets of transformers are called with
    `input_ids` and `attention_mask`, and `logits` of their output is checked. The checks use a
    copy; `net` and torch's random state are unchanged.

    Padding is passed as the keywords `src_lengths` and `tgt_lengths`, or `lengths` (int, (B,)), and
    `padding_side="left"`, if the signature of `forward` has them; else as `pad_id`. Cached decoding
    is checked if the net has `start(src, src_lengths, capacity=...) -> cache` and
    `step(ids (N, 1), cache) -> logits`; `cache.reorder(rows)` is optional. A decoder-only net has
    `start(rows, capacity=...)`, with the keyword `starts` if it supports left padding, and
    `step(ids (N, T), cache)`.

    Args:
        stacks: 2 for an encoder-decoder, 1 for a decoder or encoder; default: by the number of
            required arguments of `forward`.
        causal: for one stack: True for a decoder, False for an encoder; known for heedful's nets.
        outputs: for one stack: tokens (logits of the vocabulary), classes (logits, one row per
            text), states, or vectors (one per text); default: by their shape.
        vocab_size: for one stack; default: the size of its embeddings.
        src_vocab_size, tgt_vocab_size: for two stacks; default: the sizes of the embeddings.
        pad_id: the id of padding, for nets without lengths.
        left_padding: check left padding; default: if `forward` has the keyword `padding_side`.
        max_distance: for one stack whose layers all have windows: the largest distance of a token
            that has an effect, L·(W - 1) for L layers with windows of W keys; known for heedful's
            nets.
        call: `call(net, src, tgt)` or `call(net, ids)`, for nets with other signatures; it may have
            the keywords above. It must call its argument `net`, which is a copy.
        length: maximum length of the sequences, padding included; at least 8.
        long_length: length of the texts in which distant tokens must not leak and the cache grows;
            at least `length`; shorter if the net raises for it.
        tolerance: maximum rounding error of outputs, in their standard deviations; default: by the
            type of the weights.
        fresh: the net is newly initialized, so that its loss must be near ln V.
        overfit: train a copy on one batch, for at most `overfit_seconds`.
        seed: seed of the random ids.
        on_result: called with each result.

    Raises:
        UserError: the net cannot be copied; its vocabulary sizes, its number of stacks or whether
            it is causal cannot be determined.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> stack = nn.TransformerEncoder(layer, num_layers=1)
    >>> net = nn.Sequential(nn.Embedding(20, 16), stack, nn.Linear(16, 20))
    >>> report = verify(net, causal=True, overfit=False)  # of a net without a mask or positions
    >>> [check.name for check in report.failed]
    ['causality', 'position awareness']
    """
    sizes: dict[Side, int | None] = {"src": src_vocab_size, "tgt": tgt_vocab_size}
    sizes["ids"] = vocab_size
    numbers = {"length": length, "long_length": long_length}
    flags = {"causal": causal, "left_padding": left_padding, "fresh": fresh, "overfit": overfit}
    _check_arguments(net, numbers | {SIZES[side]: size for side, size in sizes.items()}, flags)
    openmp.watch()
    devices = {p.device.index or 0 for p in net.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        if call is None and hugging_face.takes_input_ids(net):
            call, causal, pad_id, left_padding = hugging_face.arguments_for(
                net, causal, pad_id, left_padding
            )
        kind = infer_kind(net, call, stacks, causal, outputs, sizes)
        if max_distance is not None:
            kind.max_distance = _checked_distance(max_distance, kind)
        if tolerance is None:  # rounding of fp32 sums in another order, and of 16-bit types
            tolerance = 5e-2 if any(p.dtype in _HALVES for p in net.parameters()) else 1e-4
        # Explicit parameters only: `**kwargs` may be passed to a function without these.
        keywords = {"padding_side", *(LENGTHS[side] for side in kind.sides)}
        accepts = frozenset(keywords & parameters_of(call or net.forward).keys())
        probe = Probe(
            **vars(kind),
            net=net,
            call=call,
            accepts=accepts,
            pad_id=pad_id,
            left_padding="padding_side" in accepts if left_padding is None else left_padding,
            vocab_sizes={side: sizes[side] or 0 for side in kind.sides},
            length=length,
            max_long_length=max(length, long_length),
            tolerance=tolerance,
            fresh=fresh,
            overfit=overfit,
            overfit_seconds=overfit_seconds,
            generator=torch.Generator().manual_seed(seed),
        )
        return _run_all(probe, on_result)


def _check_arguments(net: Any, numbers: dict[str, Any], flags: dict[str, Any]) -> None:
    """Raise `UserError` unless `net` is a module, the numbers are at least 2, or None, and the
    flags are True, False or None."""
    if not isinstance(net, nn.Module):  # callers without a type checker may pass anything
        hint = "; of a model, its net" if hasattr(net, "net") else ""
        raise UserError(f"verify needs a torch.nn.Module, not {describe(net)}{hint}")
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 2):
            raise UserError(f"{name} must be at least 2, not {describe(number)}")
    for name, flag in flags.items():
        if not isinstance(flag, bool | None):
            raise UserError(f"{name} must be True or False, not {describe(flag)}")


def _checked_distance(max_distance: int, kind: NetKind) -> int:
    """The argument `max_distance`; raises `UserError` if it is wrong or has no meaning."""
    if not kind.is_single_stack:
        raise UserError("max_distance= is not for a net with two stacks")
    if not isinstance(max_distance, int) or max_distance < 1:
        raise UserError(f"max_distance must be at least 1, not {describe(max_distance)}")
    return max_distance


def _run_all(probe: Probe, on_result: Callable[[CheckResult], None] | None) -> Report:
    results: list[CheckResult] = []
    causes: dict[str, str] = {}  # by name of a failed or skipped check: the check that failed
    for check in checks_of(single_stack=probe.is_single_stack):
        failed = [causes[name] for name in check.needs if name in causes]
        if failed:
            why = f"needs '{failed[0]}', which failed"
            result = check.result(probe, "skipped", why)
        else:
            result = check.run(probe)
        if failed or result.status == "failed":
            causes[check.name] = failed[0] if failed else check.name
        results.append(result)
        if on_result is not None:
            on_result(result)
    needed_long = "long_length" in vars(probe)  # a cached property
    long_length = probe.long_length if needed_long else None
    return Report(tuple(results), probe.length, long_length)
