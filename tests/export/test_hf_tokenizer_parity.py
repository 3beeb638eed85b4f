"""Exports of every architecture give the same texts in transformers as in heedful."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.export.hf import export_hf, import_hf
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.pipelines.nets import AnyModel
from heedful.recipe_files import RECIPES, load_recipe
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, randomized, saved_tokenizer

LINES = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"] * 10
TEXTS = ["the cat", "a dog runs in the world and more", "hello"]
SPECIALS = "the </s> sat <pad> on <s> a <unk> é"  # text like any other
MASKED = ["<mask> cat sat", "the<mask> <mask> on the mat <mask>", "a <mask>"]
KINDS = {"unigram": 45, "wordpiece": 45, "byte_bpe": 290, "word": None, "char": None, "byte": None}
ONE_OF_EACH = ("vaswani2017", "gpt2", "bert")
CASES = [(name, "bpe") for name in ARCHITECTURES]
CASES += [(name, kind) for name in ONE_OF_EACH for kind in KINDS]
ENCODERS = [name for name in ARCHITECTURES if hasattr(architecture(name).config, "head")]
OWN: dict[str, dict[str, Any]] = {"gpt": {"d_ff": 64}, "gpt3": {"window": None}}
OWN |= {name: {"position_offset": 1} for name in ("roberta", "xlm_roberta", "m2m100")}


def recipe_model_keys(recipe: str) -> tuple[str, dict[str, Any]]:
    """The architecture of a shipped recipe (None if it is the teacher's), and its keys other than
    sizes and dropout."""
    keys = dict(load_recipe(recipe).model)
    name = str(keys.pop("architecture", ""))
    return name, {k: v for k, v in keys.items() if k != "size" and "dropout" not in k}


OF_RECIPES: list[tuple[str, dict[str, Any]]] = []
for path in sorted(RECIPES.glob("*.yaml")):
    if (choice := recipe_model_keys(path.stem)) not in OF_RECIPES and choice[0]:
        OF_RECIPES.append(choice)


def random_model(name: str, kind: str = "bpe", **keys: Any) -> AnyModel:
    """A random tiny model whose outputs depend on its inputs, with the tokenizers of its task."""
    fields = architecture(name).config.__dataclass_fields__
    size = KINDS.get(kind, 45)
    options: dict[str, Any] = {"vocab_size": size, "or_fewer": size is not None}
    if "head" in fields:
        options |= {"extra_specials": ["<mask>"], "template": "both"}
    elif "vocab_size" in fields:
        options["template"] = "bos" if kind == "bpe" else "none"
    tokenizer = train_tokenizer(LINES, kind=kind, **options)
    sizes = dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), tokenizer.vocab_size)
    sizes |= {"d_model": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_length": 60}
    sizes |= dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), 1)
    known = {key: value for key, value in (sizes | {"d_ff": 32}).items() if key in fields}
    selected = {key: value for key, value in keys.items() if key not in known}
    config: Any = make_config(name, known | OWN.get(name, {}) | selected)
    net = randomized(architecture(name).build(config))
    with torch.no_grad():
        for path, weight in net.named_parameters():
            if path.endswith(("attention.sublayer.out.weight", "kv.weight", "qkv.weight")):
                weight.mul_(5)
    ids = GenerationIds()
    if "vocab_size" in fields and "head" not in fields:
        ids = GenerationIds(
            tokenizer.prefix_ids, eos_ids=(tokenizer.eos_id,), suppressed_ids=(0, 1)
        )
    labels = ("no", "yes") if keys.get("head") == "classify" else ()
    return open_net(net, config, ModelMetadata(name, "t", labels=labels, generation=ids), tokenizer)


def opened(model: AnyModel, folder: Path, auto: str) -> tuple[Any, Any]:
    """The tokenizer and the model of its export."""
    export_hf(model, folder)
    net = getattr(transformers, f"AutoModel{auto}").from_pretrained(folder).eval()
    return saved_tokenizer(folder, model.metadata.architecture), net


def assert_same_ids(reference: Any, tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Text to ids and back, with the specials and without."""
    assert reference(text)["input_ids"] == ids
    for is_whole in (True, False):
        back = reference.decode(ids, skip_special_tokens=not is_whole)
        assert back == tokenizer.decode(ids, keep_specials=is_whole)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_generated_texts_equal_transformers(name: str, kind: str, tmp_path: Path) -> None:
    assert_same(random_model(name, kind), tmp_path)


@pytest.mark.parametrize("number", range(len(OF_RECIPES)))
def test_models_of_the_shipped_recipes_equal_transformers(number: int, tmp_path: Path) -> None:
    name, keys = OF_RECIPES[number]
    model = random_model(name, **keys)
    if keys.get("positions") == "rotary" and model.kind == "translator":
        with pytest.raises(UserError, match="does not support a vaswani2017"):
            export_hf(model, tmp_path / "hf")
        return
    assert_same(model, tmp_path)


@torch.no_grad()
def assert_same(model: Any, folder: Path) -> None:
    """Special tokens, ids, and outputs, for single texts and a padded batch."""
    tokenizer = model.tgt_tokenizer
    family = {"masked language model": "ForMaskedLM", "translator": "ForSeq2SeqLM"}
    auto = family.get(model.kind, "ForCausalLM")
    hf_tokenizer, reference = opened(model, folder / "hf", auto)
    for role in ("pad", "bos", "eos", "unk", "mask", "cls", "sep"):
        id = getattr(tokenizer.specials, f"{role}_id")
        assert getattr(hf_tokenizer, f"{role}_token_id") == id
        if id is not None:
            assert [getattr(hf_tokenizer, f"{role}_token")] == tokenizer.tokens([id])
    if auto == "ForMaskedLM":
        assert_fills(hf_tokenizer, reference, model)
        return
    for text in (*TEXTS, SPECIALS):
        assert_same_ids(hf_tokenizer, tokenizer, text, model.prompt_ids([text])[0])
    assert import_hf(folder / "hf", folder / "back").ids == model.ids
    batch = hf_tokenizer(TEXTS, return_tensors="pt", padding=True)
    start = batch["input_ids"].size(1) if auto == "ForCausalLM" else 0
    for beam in (1, 4):
        ids = reference.generate(**batch, num_beams=beam, max_new_tokens=9)
        texts_of_hf = hf_tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)
        # The rule of transformers: "optimal" also keeps endings of lower rank, which may win.
        stop = {"stop_rule": "heuristic"} if beam > 1 else {}
        assert texts_of_hf == model.generate(TEXTS, beam_size=beam, max_new_tokens=9, **stop)


def assert_fills(hf_tokenizer: Any, theirs: Any, model: Any) -> None:
    """Masks in a padded batch are filled by the same tokens with equal probabilities."""
    for text in (*TEXTS, *MASKED):
        assert_same_ids(hf_tokenizer, model.tokenizer, text, model.ids_with_masks(text))
    batch = hf_tokenizer(MASKED, return_tensors="pt", padding=True)
    logits = theirs(**batch).logits
    logits[..., sorted(model.tokenizer.special_ids)] = -torch.inf
    for text, ids, row in zip(MASKED, batch["input_ids"], logits, strict=True):
        actual = row[ids == hf_tokenizer.mask_token_id].softmax(-1).topk(3)
        ours = model.fill(text, top_k=3)
        assert [[item.id for item in place] for place in ours] == actual.indices.tolist()
        chances = torch.tensor([[item.probability for item in place] for place in ours])
        torch.testing.assert_close(chances, actual.values, **CLOSE)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_classes_of_text_pairs_equal_transformers(name: str, tmp_path: Path) -> None:
    model: Any = random_model(name, head="classify", num_labels=2)
    hf_tokenizer, reference = opened(model, tmp_path / "hf", "ForSequenceClassification")
    others = [*reversed(TEXTS)]
    for more in ({}, {"pairs": others}):
        batch = hf_tokenizer(TEXTS, *more.values(), return_tensors="pt", padding=True)
        ours = torch.from_numpy(model.class_logits(TEXTS, **more))
        torch.testing.assert_close(reference(**batch).logits, ours, **CLOSE)
    actual = [[*item.probabilities.values()] for item in model.classify(TEXTS, pairs=others)]
    torch.testing.assert_close(torch.tensor(actual), ours.softmax(-1), **CLOSE)
    assert [reference.config.id2label[label] for label in (0, 1)] == [*model.labels]


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_states_of_texts_equal_transformers(name: str, tmp_path: Path) -> None:
    model: Any = random_model(name, head="none")
    hf_tokenizer, reference = opened(model, tmp_path / "hf", "")
    batch = hf_tokenizer(TEXTS, return_tensors="pt", padding=True)
    states, real = reference(**batch).last_hidden_state, batch["attention_mask"][..., None]
    mean = (states * real).sum(1) / real.sum(1)
    torch.testing.assert_close(mean, model.embed(TEXTS), **CLOSE)


def test_roberta_with_another_position_offset_than_transformers_is_refused(
    tmp_path: Path,
) -> None:
    """In transformers positions count from the id of padding."""
    with pytest.raises(UserError, match=r"train it with model\.position_offset=1$"):
        export_hf(random_model("roberta", position_offset=2), tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_mask_that_includes_the_space_before_it_does_so_here(tmp_path: Path) -> None:
    """As in RoBERTa."""
    export_hf(random_model("bert", "byte_bpe"), tmp_path / "hf")
    path = tmp_path / "hf/tokenizer.json"
    content = json.loads(path.read_text())
    [mask] = [token for token in content["added_tokens"] if token["content"] == "<mask>"]
    mask["lstrip"] = True
    path.write_text(json.dumps(content))
    model: Any = import_hf(tmp_path / "hf", tmp_path / "back")
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in MASKED:
        assert model.ids_with_masks(text) == hf_tokenizer(text)["input_ids"]
