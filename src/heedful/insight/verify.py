"""The runner: every check on one net, none of which leaves a trace in it."""

from collections.abc import Callable

import torch
from torch import nn

from heedful.insight import checks, learning_checks, padding_checks
from heedful.insight.checks import Check
from heedful.insight.probe import Call, Probe, first_line, make_probe
from heedful.insight.report import CheckResult, Report

CHECKS: tuple[Check, ...] = (
    checks.output_shape,
    checks.deterministic,
    checks.causality,
    checks.mask_polarity,
    checks.position_awareness,
    checks.batch_independence,
    padding_checks.source_padding_right,
    padding_checks.source_padding_left,
    padding_checks.target_padding_right,
    padding_checks.target_padding_left,
    padding_checks.empty_rows,
    checks.cached,
    learning_checks.gradient_flow,
    padding_checks.padding_gradient,
    learning_checks.weight_tying,
    learning_checks.bf16,
    learning_checks.initial_loss,
    learning_checks.one_batch_overfits,
)


def verify(
    net: nn.Module,
    *,
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
    """Hold a module `(src (B, S), tgt (B, T)) -> logits (B, T, V)` to what a Transformer promises.

    The net is copied first; its weights, gradients, modes and buffers, and torch's random state,
    are afterwards what they were. A module of any origin will do. Padding is shown to it by
    `src_lengths=` and `tgt_lengths=` (int, (B,)) where its `forward` names them, on the left by
    `padding_side="left"` likewise; else as `pad_id`. Where it has
    `start(src, src_lengths, capacity=...) -> cache` and `step(ids (N, 1), cache) -> logits`,
    cached decoding is checked, with `cache.reorder(rows)` where there is one.

    Args:
        src_vocab_size, tgt_vocab_size: default: what its embeddings have.
        pad_id: the id by which the net knows padding, if it goes by ids.
        left_padding: whether left padding must be right; default: whether it takes
            `padding_side`.
        call: `call(net, src, tgt)` for a net that is called otherwise; it may name the three
            keywords above. It must call the net that it is given, which is a copy.
        length: longest sequence to show it, padding included; at least 8.
        tolerance: largest difference of logits that counts as rounding, in their standard
            deviations; default: by the type of the weights.
        fresh: whether the net is newly initialised, so that its loss must be near ln V.
        overfit: whether to train a copy on one batch, for at most `overfit_seconds`.
        seed: of the random ids.
        on_result: called with each result as it comes.

    Raises:
        UserError: `net` cannot be copied, or its vocabulary sizes are not known.
    """
    devices = {p.device.index or 0 for p in net.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        probe = make_probe(
            net,
            src_vocab_size=src_vocab_size,
            tgt_vocab_size=tgt_vocab_size,
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
        for check in CHECKS:
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
            return CheckResult(check.name, "skipped", why, holds=check.holds)
    try:
        result = check.run(probe)
    except Exception as error:  # a net that is being verified may raise anything
        seen = f"raised {first_line(error)}"
        result = CheckResult(check.name, "failed", seen, check.hint, holds=check.holds)
    if result.status == "failed":
        sunk[check] = check
    return result
