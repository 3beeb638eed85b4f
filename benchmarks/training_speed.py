"""Training speed in tokens/s: heedful, torch.nn.Transformer and transformers' Marian.

One optimizer step is forward, loss with label smoothing, backward, clipping and fused Adam. Tokens
are those of source and target without padding. All train in one process, in alternating rounds.
Marian's attention (eager or sdpa) is selected for each size and precision by `common.fastest`, on
other batches than those measured. The peers compute no logits at padding either.

The matrix products of heedful's steps, with their shapes, memory layouts and types, also run alone
in these rounds. Their rate is the limit of the machine for such a step.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import (
    argument_parser,
    command_line,
    fastest,
    installed,
    interleaved,
    medians,
    paired_ratio,
    ratio,
    table,
    whole,
    write_results,
)
from heedful.config import Training
from heedful.data.collate import Batch, collate_pairs
from heedful.data.columns import pack_ids
from heedful.evaluation.likelihood import batch_loss
from heedful.kernels import library as kernels
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import Checkpoints
from heedful.training.step import LossNet
from heedful.training.trainer import Trainer
from heedful.zoo import vaswani2017
from step_products import record_products, runner

PAD, BOS, EOS = 0, 1, 2
DROPOUT, SMOOTHING, CLIP, RATE, BETAS, EPS = 0.1, 0.1, 1.0, 1e-4, (0.9, 0.98), 1e-9
PRECISIONS = ("fp32", "bf16")
ATTENTIONS = ("eager", "sdpa")  # of transformers
LEAST = 0.2  # seconds of a case in a round
Case = Callable[[], float]


@dataclass(frozen=True)
class Size:
    """A model's size and its batch: `rows` pairs with up to `width` tokens per side."""

    d_model: int
    num_heads: int
    num_layers: int
    d_ff: int
    rows: int
    width: int
    vocab_size: int = 8_000


SIZES = {
    "tiny": Size(128, 4, 4, 256, 128, 16),
    "small": Size(256, 8, 4, 1024, 128, 16),
    "base": Size(512, 8, 6, 2048, 64, 24),
}
QUICK = {"quick": Size(16, 2, 1, 32, 4, 8, 50)}


def main() -> None:
    """Measure every size and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--peers",
        default="torch,transformers",
        help="other implementations, comma-separated; may be empty",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds, of which the median is taken"
    )
    parser.add_argument("--steps", type=int, default=2, help="steps per implementation and round")
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if peer]
    if not installed("transformers"):
        peers = [peer for peer in peers if peer != "transformers"]
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    data = {}
    for name, size in (QUICK if arguments.quick else SIZES).items():
        torch.manual_seed(1)
        attention = choose_attention(size, quick=arguments.quick) if "transformers" in peers else {}
        cases, parameters, flops = make_cases(size, ["heedful", *peers], steps, attention)
        rates = interleaved(cases, rounds=rounds, least=LEAST if not arguments.quick else 0.0)
        data[name] = {
            "parameters": parameters,
            "product_flops_per_token": flops,
            "marian_attention": attention,
            "tokens_per_second": medians(rates),
            "tokens_per_second_by_round": rates,
        }
        print(name, attention, {case: round(rate) for case, rate in medians(rates).items()})
    write_results(
        "training_speed",
        "Training speed",
        sections(data, ["heedful", *peers], rounds, steps),
        {"rounds": rounds, "steps": steps, "sizes": data},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers",),
    )


def make_batches(size: Size, seed: int) -> list[Batch]:
    """Batches of random ids, with lengths uniform in the last quarter of the width."""
    rng = np.random.default_rng(seed)
    least = size.width - size.width // 4 + 1
    batches = []
    for _ in range(4):
        sides = []
        for _ in ("source", "target"):
            lengths = rng.integers(least, size.width + 1, size.rows)
            lengths[0] = size.width
            rows = [rng.integers(EOS + 1, size.vocab_size, n).tolist() for n in lengths]
            sides.append(pack_ids(rows, size.vocab_size))
        batches.append(collate_pairs(*sides, np.arange(size.rows), start_ids=[BOS], pad_id=PAD))
    return batches


def choose_attention(size: Size, *, quick: bool) -> dict[str, str]:
    """For each precision the attention with which Marian trains fastest, on separate batches."""
    batches = make_batches(size, seed=2)
    fastest_attention = {}
    for precision in PRECISIONS:
        cases = [
            partial(take_steps, plain_step(Marian(size, attention), precision), cycle(batches), 1)
            for attention in ATTENTIONS
        ]
        index = fastest(cases, rounds=1 if quick else None, least=0.0 if quick else LEAST)
        fastest_attention[precision] = ATTENTIONS[index]
    return fastest_attention


def make_cases(
    size: Size, who: list[str], steps: int, attention: dict[str, str]
) -> tuple[dict[str, Case], dict[str, int], float]:
    """Functions that train some steps, or compute their products; parameters; FLOPs per token.

    There is one for each implementation and precision. Each precision trains separate weights; bf16
    uses autocast.

    Args:
        attention: Marian's attention by precision.
    """
    batches = make_batches(size, seed=1)
    cases: dict[str, Case] = {}
    parameters = {}
    for name, precision in product(who, PRECISIONS):
        net = Marian(size, attention[precision]) if name == "transformers" else MODELS[name](size)
        parameters[name] = sum(parameter.numel() for parameter in net.parameters())
        stepper = heedful_step if name == "heedful" else plain_step
        step = stepper(net, precision)
        cases[f"{name} {precision}"] = partial(take_steps, step, cycle(batches), steps)
        if name == "heedful":
            with kernels.unused():  # whose products torch does not see
                products = {id(batch): record_products(partial(step, batch)) for batch in batches}
            alone = {key: runner(recorded) for key, recorded in products.items()}
            multiply = partial(_run_of, alone)
            cases[f"products {precision}"] = partial(take_steps, multiply, cycle(batches), steps)
            flops = sum(product.flops for recorded in products.values() for product in recorded)
    return cases, parameters, flops / sum(batch.num_tokens for batch in batches)


def _run_of(runs: dict[int, Callable[[], None]], batch: Batch) -> None:
    runs[id(batch)]()


def take_steps(step: Callable[[Batch], None], batches: Iterator[Batch], count: int) -> int:
    """Train `count` steps; returns the number of tokens without padding."""
    tokens = 0
    for batch in (next(batches) for _ in range(count)):
        step(batch)
        tokens += batch.num_tokens
    return tokens


def heedful_step(
    net: Any, precision: str, *, compiled: bool = False, smoothing: float = SMOOTHING
) -> Callable[[Batch], None]:
    """A step of the trainer, with its checks and counters."""
    upcoming: list[Batch] = []
    settings = Training.model_validate(
        {
            "label_smoothing": smoothing,
            "clip_norm": CLIP,
            "optimizer": {"betas": BETAS, "eps": EPS},
        }
    )
    nowhere = Checkpoints(Path(tempfile.gettempdir()), keep=1)  # a step writes none
    loss_net = LossNet(net, partial(batch_loss, label_smoothing=smoothing))
    trainer = Trainer(
        loss_net,
        settings,
        lambda step: RATE,
        nowhere,
        plan_epoch=lambda epoch: upcoming,
        load_batch=lambda epoch, batch: batch,
        evaluate=_never,
        save_best=_never,
        precision=precision,
        compiler=BlockCompiler(net) if compiled else None,
    )

    def step(batch: Batch) -> None:
        upcoming[:] = [batch]
        trainer._step()

    return step


def plain_step(
    net: nn.Module,
    precision: str,
    *,
    smoothing: float = SMOOTHING,
    loss_of: Callable[..., Tensor] = F.cross_entropy,
) -> Callable[[Batch], None]:
    """A plain training step for a module that returns logits.

    Args:
        loss_of: F.cross_entropy, or compiled.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, betas=BETAS, eps=EPS, fused=True)
    net.train()
    device = next(net.parameters()).device.type

    def step(batch: Batch) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            source = None if batch.source is None else batch.source.ids
            logits = net(source, batch.tokens.ids, batch.target_positions)
            loss = loss_of(logits, batch.targets, label_smoothing=smoothing)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with the same embeddings, positions and shared output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scale = math.sqrt(size.d_model)
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.embedding.weight, std=1 / self.scale)
        angles = torch.arange(size.width)[:, None] * torch.exp(
            torch.arange(0, size.d_model, 2) * (-math.log(10_000) / size.d_model)
        )
        positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("positions", positions)
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            size.d_model,
            size.num_heads,
            size.num_layers,
            size.num_layers,
            size.d_ff,
            DROPOUT,
            batch_first=True,
        )

    def forward(self, src: Tensor, tgt: Tensor, positions: Tensor) -> Tensor:
        """Logits (M, V) at the target positions.

        Causal attention masks the target's padding, which is on the right.
        """
        width = tgt.size(1)
        causal = nn.Transformer.generate_square_subsequent_mask(width, device=tgt.device).isinf()
        states = self.transformer(
            self.embed(src),
            self.embed(tgt),
            tgt_mask=causal,
            src_key_padding_mask=src == PAD,
            memory_key_padding_mask=src == PAD,
            tgt_is_causal=True,
        )
        return F.linear(states.flatten(0, 1)[positions], self.embedding.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled embeddings plus positions."""
        x = self.embedding(ids) * self.scale + self.positions[: ids.size(1)]  # type: ignore[index]
        return self.dropout(x)


class Marian(nn.Module):
    """transformers' MarianMTModel, randomly initialized."""

    def __init__(self, size: Size, attention: str) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=size.vocab_size,
            d_model=size.d_model,
            encoder_layers=size.num_layers,
            decoder_layers=size.num_layers,
            encoder_attention_heads=size.num_heads,
            decoder_attention_heads=size.num_heads,
            encoder_ffn_dim=size.d_ff,
            decoder_ffn_dim=size.d_ff,
            dropout=DROPOUT,
            attention_dropout=DROPOUT,
            activation_dropout=DROPOUT,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=64,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
            use_cache=False,
        )
        self.net = MarianMTModel(config)
        self.net.set_attn_implementation(attention)

    def forward(self, src: Tensor, tgt: Tensor, positions: Tensor) -> Tensor:
        """Logits (M, V) at the target positions."""
        states = self.net.model(input_ids=src, attention_mask=src != PAD, decoder_input_ids=tgt)
        real = states.last_hidden_state.flatten(0, 1)[positions]
        logits: Tensor = self.net.lm_head(real) + self.net.final_logits_bias
        return logits


def heedful_model(size: Size) -> nn.Module:
    """heedful's model of the same size."""
    config = vaswani2017.Config(
        size.vocab_size,
        size.vocab_size,
        d_model=size.d_model,
        num_heads=size.num_heads,
        num_encoder_layers=size.num_layers,
        num_decoder_layers=size.num_layers,
        d_ff=size.d_ff,
        dropout=DROPOUT,
        max_length=64,
    )
    return vaswani2017.build(config)


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "heedful": heedful_model,
    "torch": TorchTransformer,
}
LABELS = {
    "heedful": "heedful",
    "torch": "torch.nn.Transformer",
    "transformers": "transformers MarianMTModel",
}


def sections(data: dict[str, Any], who: list[str], rounds: int, steps: int) -> list[str]:
    """The sections of the page: method, rates, ratios."""
    rounds_of = {size: record["tokens_per_second_by_round"] for size, record in data.items()}
    compared = [
        [
            f"{LABELS[name]}, {p}",
            *(
                ratio(size_rates.get(f"heedful {p}"), size_rates.get(f"{name} {p}"))
                for size_rates in rounds_of.values()
            ),
        ]
        for name in who[1:]
        for p in PRECISIONS
    ]
    counted = [[LABELS[n], *(whole(data[s]["parameters"][n]) for s in data)] for n in who]
    shapes = QUICK | SIZES
    sizes = [[s, *(f"{number:,}" for number in vars(shapes[s]).values())] for s in data]
    header = ["", *data]
    how = (
        "Tokens of source and target per second, without padding, in whole optimizer steps: "
        f"forward, loss with label smoothing {SMOOTHING}, backward, clipping, fused Adam; dropout "
        f"{DROPOUT} on sub-layers, attention weights and hidden units. Random ids, lengths uniform "
        "in the last quarter of the width. All run in one process in alternating rounds. Rates are "
        f"medians of {rounds} rounds of {steps} steps, ratios medians of the ratios within a "
        "round. heedful's steps are those of its trainer, with its checks, counters and kernels. "
        "The peers compute logits only at real targets."
    )
    if "transformers" in who:
        attentions = "; ".join(
            f"{size}: " + ", ".join(f"{p} {a}" for p, a in record["marian_attention"].items())
            for size, record in data.items()
        )
        how += (
            " Marian runs with the attention (eager or sdpa) that was fastest on other batches, in "
            f"the rounds of `heedful optimize` ({attentions})."
        )
    size_header = ["size", "D", "heads", "layers per side", "F", "pairs", "width", "vocabulary"]
    return [
        how,
        table(size_header, sizes),
        *rate_section(data, who),
        *(["## heedful's rate / peer's rate", table(header, compared)] if compared else []),
        "## Parameters",
        table(header, counted),
    ]


def rate_section(data: dict[str, Any], who: list[str]) -> list[str]:
    """The section of rates, of their share of the limit, and of the limit itself."""
    rates = {size: record["tokens_per_second"] for size, record in data.items()}
    rounds_of = {size: record["tokens_per_second_by_round"] for size, record in data.items()}
    speed = [
        [f"{LABELS[name]}, {p}", *(with_share(rounds_of[s], name, p) for s in data)]
        for name in who
        for p in PRECISIONS
    ]
    limits = [
        [
            f"products alone, {p}: {unit}",
            *(whole(factors[s] * rates[s][f"products {p}"]) for s in data),
        ]
        for unit, factors in (
            ("tokens per second", dict.fromkeys(data, 1.0)),
            ("GFLOP/s", {s: data[s]["product_flops_per_token"] / 1e9 for s in data}),
        )
        for p in PRECISIONS
    ]
    limit = (
        "The matrix products of heedful's step (linear layers, attention and output, forward and "
        "backward) run alone in the same rounds, with the shapes, memory layouts and types of the "
        "step. Their tokens per second are the limit: a step that takes no time for anything else. "
        "In brackets: the rate divided by the limit of the same precision, the median of rounds."
    )
    return [
        "## Tokens per second, and their share of the machine's limit",
        limit,
        table(["", *data], speed + limits),
    ]


def with_share(rates: dict[str, list[float]], name: str, precision: str) -> str:
    """The median rate of an implementation, and its share of the limit."""
    case = rates[f"{name} {precision}"]
    share = paired_ratio(case, rates[f"products {precision}"])
    return f"{whole(median(case))} ({share:.0%})"


def _never(net: nn.Module) -> Any:
    raise AssertionError("a step evaluates nothing")


if __name__ == "__main__":
    main()
