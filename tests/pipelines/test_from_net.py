"""Models from nets of other training loops: used and saved as those of a run, misuse refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import heedful
from encoder_runs import tiny
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.pipelines import Classifier, GenerationIds, LanguageModel, Translator
from heedful.zoo import bert, gpt2, vaswani2017

TEXTS = ["the red dog runs", "the big cat sees the dog", "a cat", "the old dog sees"]
LABELS = ("cat", "dog")
SIZES = {"d_model": 16, "num_heads": 2, "max_length": 16}
USES: dict[str, Callable[[Any], Any]] = {
    "translation": lambda model: model.translate(TEXTS, max_new_tokens=5),
    "language_modeling": lambda model: [
        [found.text for found in texts]
        for texts in model.generate(
            ["the", "a cat"], max_new_tokens=5, beam_size=2, return_details=True
        )
    ],
    "classification": lambda model: [
        (found.label, round(max(found.probabilities.values()), 5))
        for found in model.classify(TEXTS)
    ],
}
FAMILIES = [*USES]


def tokenizer_of(**options: Any) -> Tokenizer:
    return train_tokenizer(TEXTS, kind="word", vocab_size=None, **options)


def trained(family: str) -> tuple[nn.Module, Any, Tokenizer]:
    """A net after some steps of a plain torch loop, its Config and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(template="bos" if family == "language_modeling" else "both")
    size = tokenizer.vocab_size
    rows = [
        torch.tensor([tokenizer.add_special_tokens(ids)]) for ids in tokenizer.encode_batch(TEXTS)
    ]
    config: Any
    if family == "translation":
        layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
        config = vaswani2017.Config(size, size, d_ff=32, **SIZES, **layers)
        net = vaswani2017.build(config)
    elif family == "language_modeling":
        config = gpt2.Config(vocab_size=size, num_layers=1, **SIZES)
        net = gpt2.build(config)
    else:
        keys = {"head": "classify", "num_labels": 2}
        config = bert.Config(vocab_size=size, num_layers=1, d_ff=32, **SIZES, **keys)
        net = bert.build(config)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(12):
        ids = rows[step % len(rows)]
        if family == "classification":
            logits, targets = net(ids), torch.tensor([step % 2])
        else:
            inputs = (ids, ids[:, :-1]) if family == "translation" else (ids[:, :-1],)
            logits, targets = net(*inputs).flatten(0, 1), ids[0, 1:]
        F.cross_entropy(logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, config, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_net_from_another_loop_is_used_saved_and_loaded(tmp_path: Path, family: str) -> None:
    net, config, tokenizer = trained(family)
    labels = LABELS if family == "classification" else ()
    model = heedful.from_net(net, config, tokenizer, labels=labels)
    kinds = {"translation": Translator, "language_modeling": LanguageModel}
    assert isinstance(model, kinds.get(family, Classifier))
    assert model.net is net
    assert not net.training
    model.save(tmp_path / "saved")
    loaded = heedful.load(tmp_path / "saved", device="cpu")
    assert USES[family](loaded) == USES[family](model)
    assert loaded.metadata == model.metadata


@pytest.mark.parametrize("family", FAMILIES)
def test_the_net_of_a_run_behaves_as_the_model_of_the_run(family: str) -> None:
    changes: dict[str, Any] = {"training__max_steps": 4}
    rows: Any = [text for text in TEXTS for _ in range(5)]
    if family == "language_modeling":
        changes["model"] = {"architecture": "gpt2", "num_layers": 1, "d_model": 16, "num_heads": 2}
        changes["objective"] = {"context": 8, "sample_tokens": 3}
    elif family == "translation":
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "d_ff": 32}
        keys = {"architecture": "vaswani2017", "d_model": 16, "num_heads": 2, **sizes}
        changes |= {"model": keys, "evaluation__decode_sentences": 0}
        rows = [(text, text[::-1]) for text in rows]
    else:
        rows = [(text, "dog" if "dog" in text else "cat") for text in rows]
    held_out = {"classification": [("one dog", "dog")], "translation": [("one dog", "god eno")]}
    rows = {"train": rows, "valid": held_out.get(family, ["one dog"])}
    expected = heedful.train(tiny(family, **changes), data=rows, progress=False).model
    metadata = expected.metadata
    model = heedful.from_net(
        expected.net,
        expected.config,
        expected.src_tokenizer,
        tgt_tokenizer=expected.tgt_tokenizer,
        labels=metadata.labels,
        limits=metadata.limits,
        src_language=metadata.src_language,
        tgt_language=metadata.tgt_language,
    )
    assert USES[family](model) == USES[family](expected)
    assert model.metadata == metadata


def test_without_a_tokenizer_inputs_and_outputs_are_ids() -> None:
    net, config, _ = trained("language_modeling")
    model = heedful.from_net(net, config, generation=GenerationIds(eos_ids=(2,)))
    assert model.generate([[5, 6]], max_new_tokens=1, return_details=True)[0][0].ids
    assert not model.has_tokenizer


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda net, config, tokenizer: (nn.Linear(2, 2), config, tokenizer), "net is a Linear"),
        (
            lambda net, config, tokenizer: (net, {"d_model": 16}, tokenizer),
            "config is a dict of no",
        ),
        (lambda net, config, tokenizer: (net, config, "tokenizer.json"), "the tokenizer is a str"),
        (
            lambda net, config, tokenizer: (
                net,
                config,
                train_tokenizer([f"w{i}" for i in range(99)], kind="word", vocab_size=None),
            ),
            "entries, but the net has an embedding of",
        ),
    ],
)
def test_mismatched_parts_are_refused(change: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        heedful.from_net(*change(*trained("classification")))


def test_labels_for_another_number_of_classes_are_refused() -> None:
    net, config, tokenizer = trained("classification")
    with pytest.raises(UserError, match="3 labels, but the net has 2 classes"):
        heedful.from_net(net, config, tokenizer, labels=("a", "b", "c"))
