"""The runner: every check on one net, none of which leaves a trace in it."""

from collections.abc import Callable

import torch
from torch import nn

from heedful.insight import (
    cache_checks,
    checks,
    learning_checks,
    padding_checks,
    sight_checks,
)
from heedful.insight.checks import Check, failed, skipped
from heedful.insight.kind import Kind, Outputs, Stacks
from heedful.insight.probe import Call, Probe, first_line, make_probe
from heedful.insight.report import CheckResult, Report

CHECKS: tuple[Check, ...] = (  # of two stacks
    checks.output_shape,
    checks.deterministic,
    sight_checks.causality,
    sight_checks.mask_polarity,
    sight_checks.position_awareness,
    checks.batch_independence,
    padding_checks.source_padding_right,
    padding_checks.source_padding_left,
    padding_checks.target_padding_right,
    padding_checks.target_padding_left,
    padding_checks.empty_rows,
    cache_checks.cached,
    learning_checks.gradient_flow,
    padding_checks.padding_gradient,
    learning_checks.weight_tying,
    learning_checks.bf16,
    learning_checks.initial_loss,
    learning_checks.one_batch_overfits,
)
SINGLE_CHECKS: tuple[Check, ...] = (
    checks.output_shape,
    checks.deterministic,
    sight_checks.causality,
    sight_checks.mask_polarity,
    sight_checks.sees_both_sides,
    sight_checks.position_awareness,
    checks.batch_independence,
    padding_checks.padding_right,
    padding_checks.padding_left,
    padding_checks.empty_rows,
    cache_checks.cached,
    learning_checks.gradient_flow,
    padding_checks.padding_gradient,
    learning_checks.weight_tying,
    learning_checks.bf16,
    learning_checks.initial_loss,
    learning_checks.one_batch_overfits,
)


def checks_of(kind: Kind) -> tuple[Check, ...]:
    """What is asked of a net, in this order; which of it applies each check says itself."""
    return SINGLE_CHECKS if kind.single else CHECKS


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
    devices = {p.device.index or 0 for p in net.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        probe = make_probe(
            net,
            stacks=stacks,
            causal=causal,
            outputs=outputs,
            sizes={"src": src_vocab_size, "tgt": tgt_vocab_size, "ids": vocab_size},
            pad_id=pad_id,
            left_padding=left_padding,
            call=call,
            length=length,
            tolerance=tolerance,
            fresh=fresh,
            overfit=overfit,
            overfit_seconds=overfit_seconds,
            seed=seed,
        )
        results: list[CheckResult] = []
        sunk: dict[Check, Check] = {}  # check -> the failed check that it rests on, or itself
        for check in checks_of(probe.kind):
            result = _run(check, probe, sunk)
            results.append(result)
            if on_result is not None:
                on_result(result)
    return Report(tuple(results))


def _run(check: Check, probe: Probe, sunk: dict[Check, Check]) -> CheckResult:
    for below in check.presupposes:
        if below in sunk:
            sunk[check] = sunk[below]
            why = f"means nothing while '{sunk[below].name}' fails"
            return check.named(skipped(why), probe.kind)
    try:
        result = check.run(probe)
    except Exception as error:  # a net that is being verified may raise anything
        result = check.named(failed(f"raised {first_line(error)}"), probe.kind)
    if result.status == "failed":
        sunk[check] = check
    return result
