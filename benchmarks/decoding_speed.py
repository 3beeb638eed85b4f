"""Decoding speed in generated tokens/s: heedful against transformers' `generate`, side by side.

Random weights, sources of a fixed length, exactly so many new tokens on both sides.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common import (
    argument_parser,
    command_line,
    installed,
    interleaved,
    ratio,
    table,
    whole,
    write_results,
)
from heedful.generation import beam_search, greedy_search
from heedful.generation.rules import BannedTokens
from heedful.inference.decoding import Decoding
from heedful.parts.tokens import Tokens
from training_speed import BOS, EOS, LABELS, MODELS, PAD, QUICK, SIZES, Size

SOURCE_TOKENS, NEW_TOKENS = 16, 20
BATCHES = (1, 64)
BEAMS = {"greedy": 1, "beam 4": 4}


def main() -> None:
    """Measure every size, search and batch, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--peers", default="transformers", help="transformers, or empty")
    parser.add_argument("--rounds", type=int, default=9, help="the median is over these")
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if peer and installed(peer)]
    rounds = 1 if arguments.quick else arguments.rounds
    data: dict[str, dict[str, dict[str, float]]] = {}
    for name, size in (QUICK if arguments.quick else SIZES).items():
        torch.manual_seed(1)
        nets = {who: MODELS[who](size).eval() for who in ["heedful", *peers]}
        data[name] = {}
        for search, beam in BEAMS.items():
            for rows in BATCHES:
                src = torch.randint(EOS + 1, size.vocab_size, (rows, SOURCE_TOKENS))
                cases = {who: case(who, net, src, beam) for who, net in nets.items()}
                found = interleaved(cases, rounds=rounds)
                data[name][f"{search}, batch {rows}"] = found
                print(name, search, rows, {who: round(rate) for who, rate in found.items()})
    write_results(
        "decoding_speed",
        "Decoding speed",
        sections(data, ["heedful", *peers], rounds),
        {"rounds": rounds, "tokens_per_second": data},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers",),
    )


def case(who: str, net: nn.Module, src: Tensor, beam: int) -> Callable[[], float]:
    """A function that decodes the batch once and gives the number of tokens of the best outputs."""
    decode = heedful_decode if who == "heedful" else transformers_decode
    return partial(decode, net, src, beam)


@torch.inference_mode()
def heedful_decode(net: Any, src: Tensor, beam: int) -> float:
    """Encode, then search with the cache, as a translator does."""
    lengths = torch.full((len(src),), src.size(1))
    cache = net.start(Tokens.of(src, lengths), capacity=16 * beam, beams=beam)
    start = torch.full((len(src), 1), BOS)
    state = Decoding(net, cache, longest=NEW_TOKENS)
    options: dict[str, Any] = {
        "eos_id": EOS,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "state": state,
        "rules": [BannedTokens([PAD, BOS])],
    }
    if beam == 1:
        found = greedy_search(state.next_log_probs, start, **options)
    else:
        found = beam_search(state.next_log_probs, start, beam_size=beam, **options)
    lengths_found = {len(hypotheses[0].ids) for hypotheses in found}
    assert lengths_found == {NEW_TOKENS}, lengths_found
    return len(src) * NEW_TOKENS


@torch.inference_mode()
def transformers_decode(net: Any, src: Tensor, beam: int) -> float:
    """`generate` with its cache and the same search."""
    found = net.model.generate(
        input_ids=src,
        attention_mask=torch.ones_like(src),
        num_beams=beam,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        length_penalty=1.0,
    )
    assert found.shape == (len(src), NEW_TOKENS + 1), found.shape
    return len(src) * NEW_TOKENS


def sections(data: dict[str, Any], who: list[str], rounds: int) -> list[str]:
    """The page: how, the rates, the ratios."""
    columns = [(size, setting) for size in data for setting in data[size]]
    rows = []
    for size, setting in columns:
        found = data[size][setting]
        row = [f"{size}, {setting}", *(whole(found.get(name)) for name in who)]
        rows.append([*row, *(ratio(found["heedful"], found.get(name)) for name in who[1:])])
    header = ["", *(LABELS[name] for name in who), *(f"heedful / {name}" for name in who[1:])]
    how = (
        f"Generated tokens in a second, fp32, random weights: sources of {SOURCE_TOKENS} tokens, "
        f"exactly {NEW_TOKENS} new ones, encoding included. The tokens of the best output count, "
        "not those of every beam. All run in one process in turn; each figure is the median of "
        f"{rounds} rounds."
    )
    shapes = QUICK | SIZES
    sizes = [[s, *(f"{n:,}" for n in _model_numbers(shapes[s]))] for s in data]
    return [
        how,
        table(["size", "D", "heads", "layers a side", "F", "vocabulary"], sizes),
        "## Tokens per second",
        table(header, rows),
    ]


def _model_numbers(size: Size) -> tuple[int, ...]:
    return size.d_model, size.num_heads, size.num_layers, size.d_ff, size.vocab_size


if __name__ == "__main__":
    main()
