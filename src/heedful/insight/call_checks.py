"""Checks of single calls: the shape of outputs, state between calls, dropout, and norms."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.insight.checks import (
    Failed,
    Outcome,
    Skipped,
    check,
    distance,
    has_no_nan,
    require_equal,
)
from heedful.insight.probe import NetInputs, Probe, first_line


@check(
    "no state between calls",
    requirement="a call has the same {outputs} after other calls, of other texts and lengths",
    hint="A module keeps something of a call for the next one: hidden states, a cache of keys, "
    "statistics, or a mask or positions in the size of an earlier batch. Pass such things as "
    "arguments, or compute them anew. (Random numbers that are not torch's look the same.)",
)
def stateless(probe: Probe) -> Outcome:
    """A call is repeated after others, each with the same random numbers of dropout.

    On another copy, so that no earlier check was a call of it.
    """
    calls = copy.copy(probe)
    calls.net = copy.deepcopy(probe.original).eval()

    def outputs_of(batch: NetInputs) -> Any:
        torch.manual_seed(0)
        with torch.no_grad():
            return calls.call_net(batch)

    batch = probe.batch(3)
    try:
        before = outputs_of(batch)
    except Exception as error:  # of any kind
        raise Skipped("the first call raises, see 'output shape'") from error
    if not isinstance(before, Tensor) or before.dim() < 2 or not has_no_nan(before):
        raise Skipped("the outputs are wrong, see 'output shape'")
    before = before.clone()  # the net may write to its outputs
    shorter = {side: ids[:2, :-1] for side, ids in probe.batch(3).ids.items()}
    for other in (probe.long_batch(4, probe.length), NetInputs(shorter), batch):
        try:
            after = outputs_of(other)
        except Exception as error:  # of any kind
            calls.net = copy.deepcopy(probe.original).eval()
            if _raises(outputs_of, other):
                raise Skipped("a first call raises, see 'output shape'") from error
            raise Failed(f"a call after others raised {first_line(error)}") from error
    if not isinstance(after, Tensor) or after.shape != before.shape:
        raise Failed("the outputs of a call after others have another shape")
    flat = [values.detach().double().flatten(1)[:, None] for values in (before, after)]
    gap = distance(*flat)
    if gap > probe.tolerance:
        detail = f"{probe.outputs_name} of the same texts differ by {gap:.1e} after other calls"
        raise Failed(detail, gap)
    return "earlier calls have no effect", gap


def _raises(call: Callable[[NetInputs], Any], batch: NetInputs) -> bool:
    try:
        call(batch)
    except Exception:  # of any kind
        return True
    return False


@check(
    "output shape",
    requirement="net(src (B, S), tgt (B, T)) returns finite logits (B, T, V)",
    hint="Look for batch and sequence in the wrong order, heads split in the wrong order, or an "
    "output that is a tuple; NaN usually comes from a softmax over a row that is fully masked.",
    single_requirement="net(ids (B, T)) returns finite {outputs} of the right shape",
    needs=("no state between calls",),
)
def output_shape(probe: Probe) -> Outcome:
    """The shape for three rows, and for rows of the most tokens, padding included."""
    observed = _require_shape(probe, probe.batch(3))
    try:
        _require_shape(probe, probe.long_batch(3, probe.length))
    except Failed:
        raise
    except Exception as error:  # of any kind
        shorter = "; pass a smaller length= if it takes fewer" if probe.length > 8 else ""
        detail = f"texts of {probe.length} tokens raised {first_line(error)}{shorter}"
        raise Failed(detail) from error
    return observed, None


@check(
    "one row, one token",
    requirement="the {outputs} are finite and of the right shape also for one row and for one "
    "token",
    hint="A squeeze also drops a batch of one, or something is normalized over rows or over "
    "positions, whose variance needs more than one: BatchNorm, or a norm over the wrong "
    "dimension.",
    needs=("output shape",),
)
def one_row_one_token(probe: Probe) -> Outcome:
    """The shape for one row, for one token in each row, and for both."""
    batch = probe.batch(3)
    narrow = {side: ids[:, : 2 if side == "src" else 1] for side, ids in batch.ids.items()}
    single = NetInputs(narrow).select_rows(slice(1))
    for case in (batch.select_rows(slice(1)), NetInputs(narrow), single):
        shapes = ", ".join(f"{side} {tuple(ids.shape)}" for side, ids in case.ids.items())
        try:
            observed = _require_shape(probe, case)
        except Failed:
            raise
        except Exception as error:  # of any kind
            raise Failed(f"{shapes} raised {first_line(error)}") from error
    return observed, None


def _require_shape(probe: Probe, batch: NetInputs) -> str:
    """Call the net; the observation, or `Failed` unless its outputs have the right shape."""
    # Logits of tokens have the size of the vocabulary.
    has_tokens = probe.output_kind == "tokens"
    width: int | None = probe.vocab_sizes[probe.output_side] if has_tokens else None
    letter = "C" if probe.output_kind == "classes" else "D"
    with torch.no_grad():
        outputs = probe.call_net(batch)
    inputs = ", ".join(f"{side} {tuple(ids.shape)}" for side, ids in batch.ids.items())
    if not isinstance(outputs, Tensor):
        raise Failed(f"{inputs} gave a {type(outputs).__name__}, not a tensor")
    shape = tuple(outputs.shape)
    expected = (*batch.ids[probe.output_side].shape[: 1 if probe.is_pooled else 2], width)
    if len(shape) != len(expected) or shape != (*expected[:-1], width or shape[-1]):
        sizes = ", ".join(str(size or letter) for size in expected)
        raise Failed(f"{inputs} gave {shape}, not ({sizes})")
    if not outputs.is_floating_point():
        raise Failed(f"{inputs} gave {outputs.dtype}, not floating-point {probe.outputs_name}")
    if not has_no_nan(outputs):
        raise Failed(f"{inputs} gave {probe.outputs_name} with NaN or +inf")
    return f"{inputs} gave {shape}"


@check(
    "normalization",
    requirement="a norm uses the features of one position, no other positions and no other rows",
    hint="Use LayerNorm or RMSNorm over the last dimension. BatchNorm, and norms over time, depend "
    "on later tokens, on padding and on the other texts of a batch; in training BatchNorm always "
    "does.",
    needs=("output shape",),
)
def normalization(probe: Probe) -> Outcome:
    """One number in the input of each module that is called a norm is changed."""
    found: dict[str, str] = {}
    inputs = [_inputs_of_norms(probe, rows, cut) for rows, cut in ((3, 0), (4, 0), (3, 1))]
    for name, module in _norms(probe.net):
        recorded = [run[name] for run in inputs if name in run]
        if len(recorded) < 3 or any(x.dim() < 2 for x in recorded):
            continue
        norm = copy.deepcopy(module)
        for training in (False, True) if probe.causal else (False,):
            mixed = _mixed_axes(norm.train(training), *recorded)
            if mixed:
                when = " in training" if training else ""
                kind = type(module).__name__
                found[name] = f"{name} ({kind}) mixes {' and '.join(mixed)}{when}"
                break
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise Failed(f"{next(iter(found.values()))}{more}")
    number = len(inputs[0])
    if not number:
        raise Skipped("the net has no module that is called a norm")
    return f"{number} {'norm' if number == 1 else 'norms'} use one position each", None


def _norms(net: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Modules of a class that is called a norm, or is derived from one; without those that contain
    other modules."""
    for name, module in net.named_modules():
        is_norm = any("norm" in base.__name__.lower() for base in type(module).__mro__)
        if is_norm and not any(True for _ in module.children()):
            yield name, module


def _inputs_of_norms(probe: Probe, rows: int, cut: int) -> dict[str, Tensor]:
    """The first input of each norm by name, for `rows` rows without their last `cut` tokens."""
    inputs: dict[str, Tensor] = {}
    hooks = []
    for name, module in _norms(probe.net):

        def record(module: nn.Module, args: tuple[Any, ...], out: Any, name: str = name) -> None:
            x = args[0] if len(args) == 1 else None
            if isinstance(x, Tensor) and not x.is_nested and x.shape == out.shape:
                inputs.setdefault(name, x.detach().clone())

        hooks.append(module.register_forward_hook(record))
    batch = probe.batch(rows)
    cut_ids = {side: ids[:, : ids.size(1) - cut] for side, ids in batch.ids.items()}
    try:
        # With gradients, since torch's TransformerEncoder has a fast path that calls no modules.
        probe.outputs(NetInputs(cut_ids), grad=True)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@torch.no_grad()
def _mixed_axes(
    norm: nn.Module, x: Float[Tensor, "..."], more_rows: Tensor, fewer_tokens: Tensor
) -> list[str]:
    """The axes along which a change of one number of `x` spreads: "rows", "positions", or both.

    The dimensions of rows and of positions are those whose size is another in the other inputs.
    """
    changed = x.clone()
    changed[(0,) * x.dim()] += 10 * x.std() + 1
    outputs = [norm(value.clone()) for value in (x, changed)]
    spread = (outputs[0] - outputs[1]).abs() > 1e-4 * float(outputs[0].std())
    mixed = []
    for what, other in (("rows", more_rows), ("positions", fewer_tokens)):
        sizes = zip(x.shape, other.shape, strict=True)
        axes = [axis for axis, (size, other_size) in enumerate(sizes) if size != other_size]
        if any(bool(spread.transpose(0, axis)[1:].any()) for axis in axes):
            mixed.append(what)
    return mixed


@check(
    "no dropout in evaluation",
    requirement="two calls in evaluation mode return the same {outputs}",
    hint="Functional dropout needs training=self.training, and scaled_dot_product_attention "
    "needs dropout_p=0 outside training; eval() does not reach a module that is not "
    "registered.",
    needs=("output shape",),
)
def deterministic(probe: Probe) -> Outcome:
    """Two calls in evaluation mode are compared, and two in training mode.

    Buffers that calls in training mode change (running statistics) are restored.
    """
    batch = probe.batch(3)
    training = [name for name, module in probe.net.named_modules() if module.training]
    more = f"; still in training mode: {', '.join(training)}" if training else ""
    first, second = probe.outputs(batch), probe.outputs(batch)
    error = require_equal(probe, first, second, f"two calls differ by {{error}}{more}")
    saved = [(buffer, buffer.clone()) for buffer in probe.net.buffers()]
    probe.net.train()
    try:
        error_in_training = distance(probe.outputs(batch), probe.outputs(batch))
    finally:
        probe.net.eval()
        for buffer, value in saved:
            buffer.copy_(value)
    differ = "differ" if error_in_training > probe.tolerance else "agree"
    return f"equal; in training mode two calls {differ}", error
