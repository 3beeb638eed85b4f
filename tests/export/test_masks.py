"""A masked language model's export fills masks in transformers as it does here."""

from pathlib import Path

import pytest
import torch

from heedful.data.tokenizer import train_tokenizer
from heedful.export.hf import export_hf
from heedful.inference import ModelCard, open_net
from heedful.zoo import architecture
from heedful.zoo.saved import make_config

LINES = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"] * 10


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char"])
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_masks_are_filled_there_as_here(name: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"word": None, "char": None, "byte_bpe": 290}.get(kind, 45)
    tokenizer = train_tokenizer(
        LINES, kind=kind, vocab_size=size, or_fewer=True, extra_specials=["<mask>"], template="both"
    )
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "max_length": 40}
    offset = {"position_offset": 1} if name == "roberta" else {}
    config = make_config(name, {**sizes, **offset, "vocab_size": tokenizer.vocab_size})
    torch.manual_seed(0)
    net = architecture(name).build(config).eval()
    model = open_net(net, config, ModelCard(name, "masked_lm"), tokenizer)
    export_hf(model, tmp_path / "hf")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    text = f"the {there.mask_token} sat on the {there.mask_token}"
    inputs = there(text, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == model._masked_ids(text)
    assert there.decode(there.mask_token_id) == there.mask_token
    with torch.no_grad():
        logits = theirs(**inputs).logits[0]
    places = (inputs["input_ids"][0] == there.mask_token_id).nonzero()[:, 0].tolist()
    logits[:, sorted(tokenizer.special_ids)] = -torch.inf
    best = [logits[place].argsort(descending=True)[:3].tolist() for place in places]
    found = model.fill(text, top_k=3)
    assert [[each.id for each in mask] for mask in found] == best
