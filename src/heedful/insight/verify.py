"""The runner: every check on one net, none of which leaves a trace in it."""

from collections.abc import Callable

import torch
from torch import nn

from heedful.insight import cache_checks as cache
from heedful.insight import dependency_checks as dependency
from heedful.insight import learning_checks as learning
from heedful.insight import padding_checks as padding
from heedful.insight.checks import Check
from heedful.insight.kind import LENGTHS, Outputs, Side, Stacks, kind_of, parameters_of
from heedful.insight.probe import Call, Probe
from heedful.insight.report import CheckResult, Report

_HALVES = (torch.float16, torch.bfloat16)


# In this order they are asked and reported: each after those that it needs.
CHECKS = (
    dependency.output_shape,
    dependency.deterministic,
    dependency.causality,
    dependency.mask_polarity,
    dependency.sees_both_sides,
    dependency.position_awareness,
    dependency.batch_independence,
    *padding.source_padding,
    *padding.target_padding,
    *padding.text_padding,
    padding.empty_rows,
    cache.cached,
    learning.gradient_flow,
    padding.padding_gradient,
    learning.weight_tying,
    learning.bf16,
    learning.initial_loss,
    learning.one_batch_overfits,
)


def checks_of(*, single: bool) -> list[Check]:
    """The checks of a net of one stack or of two, in the order of `CHECKS`."""
    return [check for check in CHECKS if check.stacks != (2 if single else 1)]


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
    call: Call | None = None,
    length: int = 10,
    tolerance: float | None = None,
    fresh: bool = True,
    overfit: bool = True,
    overfit_seconds: float = 60.0,
    seed: int = 0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Hold a module to what a Transformer promises.

    That is one of two stacks, `(src (B, S), tgt (B, T)) -> logits (B, T, V)`, or of one: a decoder
    `(ids (B, T)) -> logits (B, T, V)`, or an encoder, which may also give states (B, T, D) or the
    logits (B, C) of a text's class. The net is copied first; its weights, gradients, modes and
    buffers, and torch's random state, are afterwards what they were. A module of any origin will
    do. Padding is shown to it by `src_lengths=` and `tgt_lengths=`, or `lengths=` (int, (B,)),
    where its `forward` names them, on the left by `padding_side="left"` likewise; else as
    `pad_id`. Where it has `start(src, src_lengths, capacity=...) -> cache` and
    `step(ids (N, 1), cache) -> logits`, cached decoding is checked, with `cache.reorder(rows)`
    where there is one; of one stack `start(rows, capacity=...)`, which may name `starts=` for
    padding on the left, and `step(ids (N, T), cache)`.

    Args:
        stacks: one or two; default: as many as the arguments that `forward` requires.
        causal: of one stack, whether no token may see later ones; known of heedful's own nets.
        outputs: of one stack: tokens (logits of a vocabulary), classes (logits of each text),
            states, or vectors (one for each text); default: by their shape.
        vocab_size: of one stack; default: what its embeddings have.
        src_vocab_size, tgt_vocab_size: of two stacks; default likewise.
        pad_id: the id by which the net knows padding, if it goes by ids.
        left_padding: whether left padding must be right; default: whether it takes
            `padding_side`.
        call: `call(net, src, tgt)` or `call(net, ids)` for a net that is called otherwise; it may
            name the keywords above. It must call the net that it is given, which is a copy.
        length: longest sequence to show it, padding included; at least 8.
        tolerance: largest difference of outputs that counts as rounding, in their standard
            deviations; default: by the type of the weights.
        fresh: whether the net is newly initialised, so that its loss must be near ln V.
        overfit: whether to train a copy on one batch, for at most `overfit_seconds`.
        seed: of the random ids.
        on_result: called with each result as it comes.

    Raises:
        UserError: `net` cannot be copied, or its vocabulary sizes are not known; it is not known
            whether it has one stack or two, or whether a single one is causal.
    """
    sizes: dict[Side, int | None] = {
        "src": src_vocab_size,
        "tgt": tgt_vocab_size,
        "ids": vocab_size,
    }
    devices = {p.device.index or 0 for p in net.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        kind = kind_of(net, call, stacks, causal, outputs, sizes)
        if tolerance is None:  # what fp32 sums in another order, or 16-bit numbers, differ by
            tolerance = 5e-2 if any(p.dtype in _HALVES for p in net.parameters()) else 1e-4
        # Only what is named counts: `**kwargs` may be passed on to something that knows none.
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
            tolerance=tolerance,
            fresh=fresh,
            overfit=overfit,
            overfit_seconds=overfit_seconds,
            generator=torch.Generator().manual_seed(seed),
        )
        return _run_all(probe, on_result)


def _run_all(probe: Probe, on_result: Callable[[CheckResult], None] | None) -> Report:
    results: list[CheckResult] = []
    sunk: dict[str, str] = {}  # a check -> the failed check that it rests on, or itself
    for check in checks_of(single=probe.single):
        below = [sunk[name] for name in check.needs if name in sunk]
        if below:
            why = f"means nothing while '{below[0]}' fails"
            result = check.result(probe, "skipped", why)
        else:
            result = check.run(probe)
        if below or result.status == "failed":
            sunk[check.name] = below[0] if below else check.name
        results.append(result)
        if on_result is not None:
            on_result(result)
    return Report(tuple(results))
