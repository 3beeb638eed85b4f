"""Random tiny nets of every architecture, and how far CTranslate2 is from each."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch

from architectures import tiny
from heedful.backends.ctranslate2.conversion import longest_prompt, refusals, write
from heedful.backends.ctranslate2.vocabulary import Vocabulary
from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens
from heedful.zoo import architecture

START, END, NEW = 1, 2, 9
CLOSE = 1e-4  # of log-probabilities, and of states
TRIED = 10  # configurations of each architecture
# Values of fields without a closed choice.
CHOICES: dict[str, list[Any]] = {
    "d_model": [8, 24],
    "num_heads": [2, 4],
    "num_kv_heads": [None, 1, 2],
    "num_decoder_heads": [None, 1],
    "decoder_d_ff": [None, 7],
    "head_dim": [None, 4, 10],
    "window": [None, 3, 48],
    "global_every": [1, 2],
    "rope_base": [500.0, 10000.0],
    "rope_scaling": [
        None,
        {"type": "linear", "factor": 2.0},
        {"type": "ntk", "factor": 3.0},
        {"type": "yarn", "factor": 4.0, "original_length": 16},
        {"type": "llama3", "original_length": 16},
    ],
    "score_softcap": [None, None, 5.0],
    "logit_softcap": [None, 3.0],
    "query_scalar": [4, 9],
    "num_buckets": [8, 32],
    "max_distance": [20, 128],
    "norm_eps": [1e-5, 1e-3],
    "final_norm": [None, True, False],
}


class Outcome(NamedTuple):
    """The result of converting a net: the largest difference, or the reasons of the refusal."""

    difference: float | None
    reasons: list[str]


def random_keys(name: str, seed: int) -> dict[str, Any]:
    """Keys of an architecture's Config besides those of `tiny`."""
    config, draw = architecture(name).config, random.Random(f"{name} {seed}")
    hints = get_type_hints(config)
    keys: dict[str, Any] = {}
    for field in fields(config):
        kind = hints[field.name]
        if field.name in CHOICES:
            options = CHOICES[field.name]
            # None where the architecture has a number is not its to take.
            keys[field.name] = draw.choice([o for o in options if o is not None or _open(kind)])
        elif kind is bool:
            keys[field.name] = draw.choice([False, True])
        elif names := _names(kind):
            keys[field.name] = draw.choice(names)
    return keys


def random_net(name: str, seed: int) -> Any:
    """A net in fp32; contradictory keys are sampled again."""
    for attempt in range(100):
        try:
            return tiny(name, **random_keys(name, 1000 * seed + attempt)).float()
        except (UserError, ValueError):
            continue
    raise AssertionError(f"no configuration of {name} in 100")


def outcome(net: Any) -> Outcome:
    """Convert a net for CTranslate2, run it, and compare log-probabilities or states.

    Raises AssertionError if greedy decoding returns other tokens.
    """
    if actual := refusals(net):
        return Outcome(None, actual)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        write(net, Path(folder), vocabulary_of(net), "float32")
        kind = EncoderDecoder if isinstance(net, EncoderDecoder) else type(net)
        compare = {EncoderDecoder: _pairs, DecoderOnly: _texts}.get(kind, _states)
        return Outcome(max(compare(net, folder)), [])


def vocabulary_of(net: Any) -> Vocabulary:
    """Tokens named by their ids."""
    sides = (
        ("src_embedding", "tgt_embedding") if isinstance(net, EncoderDecoder) else ("embedding",)
    )
    words = [words_of(range(getattr(net, side).tokens.num_embeddings)) for side in sides]
    return Vocabulary(words[0], words[-1], START, END, 0)


def words_of(ids: Any) -> list[str]:
    """Their names in the vocabulary."""
    return [f"w{i}" for i in ids]


def greedy(step: Any, prompt: list[int]) -> list[int]:
    """New tokens by the whole net at each step; `step(ids) -> logits (t, V)`."""
    ids = list(prompt)
    while len(ids) - len(prompt) < NEW and (ids == prompt or ids[-1] != END):
        ids.append(int(step(ids)[-1].argmax()))
    return ids[len(prompt) :]


def rows_of(net: Any, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 13, (n,), generator=generator).tolist() for n in lengths]


def _pairs(net: Any, folder: str) -> Iterator[float]:
    from ctranslate2 import Translator

    backend = Translator(folder, intra_threads=1)
    sources, targets = rows_of(net, (5, 9, 2)), rows_of(net, (7, 3, 4), 1)
    words = [[words_of(row) for row in side] for side in (sources, targets)]
    actual = backend.translate_batch(
        words[0], beam_size=1, max_decoding_length=NEW, min_decoding_length=0, return_end_token=True
    )
    scores = backend.score_batch(*words)
    for src, tgt, written, scored in zip(sources, targets, actual, scores, strict=True):

        def logits(ids: list[int], src: list[int] = src) -> torch.Tensor:
            return net(torch.tensor([src]), torch.tensor([ids]))[0]

        assert written.hypotheses[0] == words_of(greedy(logits, [START]))
        ours = logits([START, *tgt]).log_softmax(-1)
        reference = torch.tensor(scored.log_probs)
        yield _difference(ours[range(len(tgt) + 1), [*tgt, END]], reference)


def _texts(net: Any, folder: str) -> Iterator[float]:
    from ctranslate2 import Generator

    backend = Generator(folder, intra_threads=1)
    longest = longest_prompt(net) or 9
    rows = rows_of(net, (longest, 2, min(5, longest)))
    actual = backend.generate_batch(
        [words_of(row) for row in rows],
        max_length=NEW,
        include_prompt_in_result=False,
        return_end_token=True,
    )
    scores = np.array(backend.forward_batch(rows, return_log_probs=True))

    def logits(ids: list[int]) -> torch.Tensor:
        return net(torch.tensor([ids]))[0]

    for row, written, reference in zip(rows, actual, scores, strict=True):
        assert written.sequences_ids[0] == greedy(logits, row)
        ours = logits(row).log_softmax(-1)
        yield _difference(ours, torch.tensor(reference[: len(row)]))


def _states(net: Any, folder: str) -> Iterator[float]:
    from ctranslate2 import Encoder

    rows = rows_of(net, (5, 9, 2))
    types = None
    if net.embedding.types is not None:
        last = net.embedding.types.num_embeddings - 1
        types = [[min(last, place // 2 % 2) for place in range(len(row))] for row in rows]
    actual = Encoder(folder, intra_threads=1).forward_batch(rows, token_type_ids=types)
    for place, (row, reference) in enumerate(
        zip(rows, np.array(actual.last_hidden_state), strict=True)
    ):
        kinds = None if types is None else torch.tensor([types[place]])
        ours = net.encode(Tokens.from_ids(torch.tensor([row])), kinds)[0]
        yield _difference(ours, torch.tensor(reference[: len(row)]))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference; of numbers above 1 relative to the largest."""
    return float((ours - theirs).abs().max() / max(1.0, float(ours.abs().max())))


def _open(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _names(kind: Any) -> list[str]:
    """The names of a closed choice."""
    if get_origin(kind) is Literal:
        return [item for item in get_args(kind) if isinstance(item, str)]
    return [name for part in get_args(kind) for name in _names(part)]
