"""Random models with a tokenizer trained on a few lines."""

from itertools import product
from pathlib import Path
from typing import Any

import torch

from architectures import SIZES, config_of
from heedful.backends.manifest import Manifest
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.convert import convert_model
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import architecture
from option_space import randomized

TEXTS = ["the cat sat on the mat", "a dog ran home", "the dog sat", "cats and dogs ran"]
VOCAB = 40


def model_of(name: str, **keys: Any) -> Any:
    """A random model of an architecture at a tiny size, in fp32."""
    template = "both" if name == "bert" else "none"
    tokenizer = train_tokenizer(TEXTS, kind="bpe", vocab_size=VOCAB, template=template)
    vocabularies = dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCAB)
    config = config_of(name, SIZES | vocabularies | {"d_model": 16}, keys)
    torch.manual_seed(0)
    net = randomized(architecture(name).build(config))
    ids = GenerationIds()
    if name != "bert":
        ids = GenerationIds((tokenizer.bos_id,), (tokenizer.eos_id,))
    labels = ("good", "bad") if keys.get("head") == "classify" else ()
    metadata = ModelMetadata(name, "test", labels=labels, generation=ids)
    return open_net(net, config, metadata, tokenizer)


def all_scores(
    model: Any, row: list[int], longest: int, penalty: float, log_probs_of: Any
) -> dict[tuple[int, ...], float]:
    """The score of every output of at most `longest` tokens.

    `log_probs_of(sources, ids)` returns log-probabilities (N, T, V) and a term added to each score.
    """
    [end], [start], never = (
        model.end_ids(),
        model.ids.decoder_start_ids,
        set(model.ids.suppressed_ids),
    )
    others = [token for token in range(VOCAB) if token != end and token not in never]
    actual = {}
    for size in range(longest):
        prefixes = [*product(others, repeat=size)]
        ids = torch.tensor([[start, *prefix] for prefix in prefixes])
        with torch.inference_mode():
            log_probs, added = log_probs_of(torch.tensor([row] * len(ids)), ids)
        so_far = log_probs[:, :-1].gather(2, ids[:, 1:, None]).sum((1, 2))
        for token in [end] if size < longest - 1 else [end, *others]:
            total = (so_far + log_probs[:, -1, token]) / (size + 1) ** penalty + added
            actual |= {(*p, token): item for p, item in zip(prefixes, total.tolist(), strict=True)}
    return actual


def saved(
    name: str, directory: Path, precisions: tuple[str, ...] = ("float32",), **keys: Any
) -> Any:
    """A model directory with conversions and their manifest, and the model."""
    model = model_of(name, **keys)
    model.save(directory)
    manifest = Manifest.new(directory, type(model).__name__)  # type: ignore[arg-type]
    for precision in precisions:
        facts = convert_model(model, directory, precision)
        manifest = manifest.with_conversion("ctranslate2", precision, facts, {})
    manifest.write(directory)
    return model
