"""Import and export of models in the Hugging Face format, against `transformers`."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from backend_models import model_of
from commands import tree
from decoder_parity import DecoderCase
from encoder_parity import EncoderCase
from heedful.config import parse_recipe
from heedful.data.columns import open_columns
from heedful.data.hf_tokenizers import write_tokenizer
from heedful.data.prepared import cache_folder
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.deploy.optimize import optimize
from heedful.errors import UserError
from heedful.export.ctranslate2 import export_ctranslate2
from heedful.export.hf import export_hf, import_hf
from heedful.options import SAMPLING_OPTIONS
from heedful.pipelines import (
    GenerationIds,
    LanguageModel,
    ModelMetadata,
    Translator,
    load,
    load_classifier,
    load_language_model,
)
from heedful.pipelines.hf_generation import generation_to_hf, lost_options, read_options
from heedful.run import train
from heedful.zoo.hf import HfDirectory
from hf_parity import assert_same_net, changed, random_hf, saved_tokenizer
from parity_cases import CASES
from seq2seq_parity import Seq2SeqCase

LINES = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"] * 20
VOCAB = 64
LABELS = {0: "neg", 1: "neutral", 2: "pos"}
AUTO = {DecoderCase: "CausalLM", EncoderCase: "MaskedLM", Seq2SeqCase: "Seq2SeqLM"}
BEGIN_AND_END = {"bos_token_id": 1, "eos_token_id": 2}
ROBERTA = {"pad_token_id": 0, "max_position_embeddings": 49}
# What a configuration has besides that of its parity tests.
KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt", "gpt2", "gpt3", "qwen2", "qwen3", "gemma3"), BEGIN_AND_END),
    "bert": {"pad_token_id": 0},
    "roberta": ROBERTA,
    "xlm_roberta": ROBERTA,
    "marian": {"pad_token_id": 0, "decoder_start_token_id": 0}
    | {"eos_token_id": 2, "forced_eos_token_id": 2},
    "m2m100": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "mbart": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "pegasus": {"decoder_start_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2},
    "t5": {"eos_token_id": 2},
}
CLASSES = {"pad_token_id": 0, "id2label": LABELS, "label2id": {v: k for k, v in LABELS.items()}}
BERT, DISTILBERT = CASES["bert"], CASES["distilbert"]
# The case of its parity tests, the Auto class, and those keys.
FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    **{name: (case, AUTO[type(case)], KEYS.get(name, {})) for name, case in CASES.items()},
    "bert-classes": (
        replace(BERT, hf_class=BERT.classify_class),
        "SequenceClassification",
        CLASSES,
    ),
    "distilbert": (replace(DISTILBERT, hf_class=DISTILBERT.base_class), "", {}),
}
DECODERS = [name for name in FAMILIES if FAMILIES[name][1] == "CausalLM"]
WRITERS = [*DECODERS, *(name for name in FAMILIES if FAMILIES[name][1] == "Seq2SeqLM")]


def auto_class(name: str) -> Any:
    """The Auto class of transformers for a family."""
    head = FAMILIES[name][1]
    return getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")


def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer trained here; without special tokens around a text for language models."""
    template = "none" if FAMILIES[name][1] == "CausalLM" else "both"
    return train_tokenizer(
        LINES, kind="bpe", vocab_size=40, extra_specials=["<mask>"], template=template
    )


def hf_model_of(name: str) -> Any:
    case, _, keys = FAMILIES[name]
    lengths = dict.fromkeys(case.sizes.keys() & {"n_positions", "max_position_embeddings"}, 48)
    sizes = case.sizes | {"vocab_size": VOCAB} | lengths | keys
    return random_hf(case.hf_class, case.hf_config(**sizes))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each family as written by transformers, with a tokenizer."""
    root = tmp_path_factory.mktemp("theirs")
    for name in FAMILIES:
        hf_model_of(name).save_pretrained(root / name)
        write_tokenizer(tokenizer_of(name), root / name)
    return {name: root / name for name in FAMILIES}


# --- both ways ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_model_is_imported_as_the_same_model(
    name: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    model = import_hf(directories[name], tmp_path / "ours")
    opened = load(tmp_path / "ours", device="cpu")
    assert_same_net(model.net, opened.net)
    assert (opened.metadata, opened.config) == (model.metadata, model.config)

    export_hf(opened, tmp_path / "hf")
    tokenizer = saved_tokenizer(tmp_path / "hf", name)
    assert tokenizer("a dog sat")["input_ids"] == model.encode(["a dog sat"])[0]
    assert tokenizer.model_max_length == model.config.max_length
    auto = auto_class(name)
    back, report = auto.from_pretrained(tmp_path / "hf", output_loading_info=True)
    allowed = {"missing_keys"} if name == "distilbert" else set()
    assert not any(actual for kind, actual in report.items() if kind not in allowed), report
    reference = auto.from_pretrained(directories[name])
    assert_same_net(reference, back)
    assert reference.config.id2label == back.config.id2label

    again = import_hf(tmp_path / "hf", tmp_path / "again")
    assert_same_net(model.net, again.net)
    assert (again.metadata, again.config) == (model.metadata, model.config)
    text = "the cat sat <mask> world"
    assert again.encode([text]) == opened.encode([text]) == model.encode([text])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_opens_in_memory_as_after_its_import(
    name: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    """The same net, metadata and tokenizer, transformers' logits, and nothing is written."""
    source, before = directories[name], tree(directories[name])
    import_hf(source, tmp_path / "imported")
    imported, opened = (load(path, device="cpu") for path in (tmp_path / "imported", source))
    assert type(opened) is type(imported)
    assert (opened.metadata, opened.config) == (imported.metadata, imported.config)
    assert_same_net(opened.net, imported.net)
    assert opened.encode(LINES[:3]) == imported.encode(LINES[:3])

    ids = torch.tensor([opened.encode(LINES[:1])[0]])
    both = {"decoder_input_ids": ids} if isinstance(opened, Translator) else {}
    with torch.no_grad():
        theirs = auto_class(name).from_pretrained(source)(input_ids=ids, **both)
        ours = opened.net(ids, ids) if both else opened.net(ids)
    expected = theirs.logits if "logits" in theirs else theirs.last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    opened.save(tmp_path / "saved")
    assert tree(tmp_path / "saved") == tree(tmp_path / "imported")
    with pytest.raises(UserError, match="is not replaced"):
        opened.save(source)
    assert tree(source) == before


def test_a_sharded_directory_opens_in_memory(
    directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = auto_class("gpt2").from_pretrained(directories["gpt2"])
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    opened = load_language_model(tmp_path / "shards", device="cpu", precision="bfloat16", threads=1)
    assert opened.net.decoder.final_norm.weight.dtype == torch.bfloat16
    assert opened.settings.threads == 1
    whole = load_language_model(directories["gpt2"], device="cpu", precision="bfloat16")
    assert_same_net(opened.net, whole.net)
    assert "has no tokenizer files: the model accepts only lists of ids" in caplog.text
    with pytest.raises(UserError, match="this model has no tokenizer: give lists of ids"):
        opened.generate("text")
    assert len(opened.generate([5, 6], max_new_tokens=2)) <= 2


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", {}, "load_language_model needs a language model, but this model is a masked"),
        ("gpt2", {"backend": "compiled"}, "no converted backends: run `heedful import hf"),
        ("gpt2", {"precision": "int8"}, "no converted backends: run `heedful import hf"),
        ("gpt2", {"backend": "onnx"}, "backend must be auto, eager"),
        ("gpt2", {"device": "tpu"}, "no device tpu here"),
    ],
)
def test_a_directory_in_memory_refuses_what_it_cannot_do(
    name: str, settings: dict[str, str], message: str, directories: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_language_model(directories[name], **settings)
    assert "\n" not in str(error.value)


def test_a_directory_of_transformers_cannot_be_a_base(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    model = load_language_model(directories["gpt2"], device="cpu")
    model.net.requires_grad_(False).head.out.weight.requires_grad_(True)
    with pytest.raises(UserError, match="cannot be a base: import it first, by `heedful import"):
        model.save(tmp_path / "out", base=directories["gpt2"])
    assert not (tmp_path / "out").exists()


def test_backends_are_not_made_beside_a_model_of_transformers(directories: dict[str, Path]) -> None:
    source = directories["gpt2"]
    with pytest.raises(UserError, match="import it first, by `heedful import hf"):
        optimize(load(source, device="cpu"), source, LINES[:2])
    assert not (source / "backends").exists()


@pytest.mark.parametrize(
    ("name", "num_beams"),
    [
        *((name, 1) for name in WRITERS),
        # Beams of every other architecture: zoo/test_generate_transformers.py.
        *((name, 3) for name in ("gpt2", "gemma3", "bart", "t5")),
    ],
)
def test_imported_and_exported_models_generate_the_same_texts(
    name: str, num_beams: int, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Start, EOS, forced and suppressed tokens are right."""
    reference = tmp_path / "theirs"
    shutil.copytree(directories[name], reference)
    settings = json.loads((reference / "generation_config.json").read_text())
    settings |= {"eos_token_id": [2, 11]}
    if num_beams == 1:  # in a beam heedful shares out their probability, transformers does not
        settings |= {"bad_words_ids": [[7], [9]]}
    if name not in DECODERS:
        settings |= {"forced_bos_token_id": 5, "forced_eos_token_id": 2}
        settings.setdefault("decoder_start_token_id", 0)  # T5's class has no such key
    (reference / "generation_config.json").write_text(json.dumps(settings))
    model = import_hf(reference, tmp_path / "ours")
    export_hf(model, tmp_path / "hf")
    auto = auto_class(name)
    text = "the dog sat on the mat"
    options = {"max_new_tokens": 12, "num_beams": num_beams, "do_sample": False}
    ours = model.generate([text], max_new_tokens=12, beam_size=num_beams, return_details=True)[0][
        0
    ].ids
    assert not {7, 9} & set(ours) or num_beams > 1
    for directory in (reference, tmp_path / "hf"):
        inputs = saved_tokenizer(directory, name)(text, return_tensors="pt")
        writer = auto.from_pretrained(directory).eval()
        start = inputs["input_ids"].size(1) if name in DECODERS else 1
        assert writer.generate(**inputs, **options)[0][start:].tolist() == ours, directory.name


@pytest.mark.parametrize("name", ["marian", "bart", "t5"])
def test_fine_tuning_on_pairs_uses_the_template_of_the_tokenizer(
    name: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Both sides have the special tokens of transformers, and the loss is equal."""
    model = import_hf(directories[name], tmp_path / "ours")
    pairs = [("the cat sat", "hello world"), ("hello", "the cat sat on a world")]
    reference = hf_model_of(name)
    reference.config.decoder_start_token_id = model.ids.decoder_start_ids[
        0
    ]  # T5's needs the option
    tokenizer = transformers.AutoTokenizer.from_pretrained(directories[name])
    for src, tgt in pairs:
        inputs, labels = (tokenizer(text, return_tensors="pt").input_ids for text in (src, tgt))
        assert labels.size(1) > 2
        with torch.no_grad():
            loss = reference(input_ids=inputs, labels=labels).loss
        (score,) = model.score([src], [tgt])
        assert score.num_tokens == labels.size(1)
        assert -score.log_prob / score.num_tokens == pytest.approx(float(loss), abs=1e-5)
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in pairs))
    held_out = tmp_path / "held-out.tsv"
    held_out.write_text("".join(f"{tgt}\t{src}\n" for src, tgt in pairs))
    content = {
        "init_from": str(tmp_path / "ours"),
        "data": {
            "train": {"file": str(path)},
            "valid": {"file": str(held_out)},
            "max_length": 30,
        },
        "training": {"max_steps": 1, "device": "cpu", "schedule": {"learning_rate": 1e-3}},
        "evaluation": {"decode_sentences": 0},
    }
    train(parse_recipe(content), tmp_path / "run")
    name = json.loads((tmp_path / "run/run.json").read_text())["data"]
    columns = open_columns(cache_folder() / name / "train")
    sources, targets = columns.sequences("src"), columns.sequences("tgt")
    for row, (src, tgt) in enumerate(pairs):
        assert sources[row].tolist() == tokenizer(src).input_ids == model.prompt_ids([src])[0]
        assert targets[row].tolist() == tokenizer(tgt).input_ids


# --- where the ids come from ----------------------------------------------------------------


def ids(start: tuple[int, ...], end: tuple[int, ...], *more: Any, **options: Any) -> GenerationIds:
    return GenerationIds(start, end, *more, **options)


NO_TEXT = ("tokenizer.json", "tokenizer_config.json")


# The end mark alone is no bad word, and a sequence with an id without a row never occurs.
SUPPRESSED = {
    "suppress_tokens": [8, 3],
    "bad_words_ids": [[5], [6, 7], [2], [2, 2], [6, 9_999]],
}
UNSAID = {"decoder_start_token_id": None}
BOTH_FORCED = {"forced_bos_token_id": 0, "forced_eos_token_id": [2]}
OLD_BART = {"force_bos_token_to_be_generated": True, "bos_token_id": 5, "forced_eos_token_id": None}


@pytest.mark.parametrize(
    ("name", "generation", "config", "has_text", "expected"),
    [
        # generation_config.json, then config.json, then the tokenizer, then their class.
        ("gpt2", {"eos_token_id": [3, 4]}, {"eos_token_id": 9}, True, ids((), (3, 4))),
        ("gpt2", {"top_k": 5}, {"eos_token_id": 9}, True, ids((), (9,))),
        ("gpt2", None, {"eos_token_id": None}, True, ids((), (2,))),
        ("gpt2", None, {"bos_token_id": 5, "eos_token_id": 6}, False, ids((5,), (6,))),
        ("llama", None, {"bos_token_id": None, "eos_token_id": None}, False, ids((1,), (2,))),
        (
            "gpt2",
            SUPPRESSED,
            {},
            True,
            ids((), (2,), (3, 5, 8), suppressed_sequences=((6, 7), (2, 2))),
        ),
        ("gpt2", {"forced_eos_token_id": 4}, {}, True, ids((), (2,), forced_eos_id=4)),
        # BART begins with the end mark; Marian and T5 with padding.
        ("bart", None, UNSAID, True, ids((2,), (2,), forced_eos_id=2)),
        ("t5", None, UNSAID, True, ids((0,), (2,))),
        ("marian", None, UNSAID, True, ids((0,), (2,), forced_eos_id=2)),
        # Forced ids are in one file only.
        ("bart", {"decoder_start_token_id": 6}, {"forced_eos_token_id": 2}, True, ids((6,), (2,))),
        ("bart", BOTH_FORCED, {}, True, ids((2,), (2,), forced_bos_id=0, forced_eos_id=2)),
        (
            "bart",
            None,
            BOTH_FORCED | {"forced_eos_token_id": None},
            True,
            ids((2,), (2,), forced_bos_id=0),
        ),
        # Transformers 3 had no forced id; a generation_config.json has priority.
        ("bart", None, OLD_BART, True, ids((2,), (2,), forced_bos_id=5)),
        ("bart", {"num_beams": 2}, OLD_BART, True, ids((2,), (2,))),
        # A token that the model has no row for can neither be written nor met.
        ("gpt2", {"eos_token_id": [2, 50256]}, {}, True, ids((), (2,))),
        ("bert", None, {"eos_token_id": 3}, True, ids((), ())),
    ],
)
def test_ids(
    name: str,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    has_text: bool,
    expected: GenerationIds,
    directories: dict[str, Path],
    tmp_path: Path,
) -> None:
    source = tmp_path / "theirs"
    shutil.copytree(directories[name], source)
    (source / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    content = json.loads((source / "config.json").read_text()) | config
    settings = {key: value for key, value in content.items() if value is not None or key in config}
    if config.get("decoder_start_token_id", 0) is None:
        del settings["decoder_start_token_id"]
    (source / "config.json").write_text(json.dumps(settings))
    for file in () if has_text else NO_TEXT:
        (source / file).unlink()
    assert import_hf(source, tmp_path / "out").metadata.generation == expected


def test_settings_that_are_not_imported_are_reported(
    directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "theirs"
    shutil.copytree(directories["bart"], source)
    settings: dict[str, Any] = {"num_beams": 4, "early_stopping": False, "min_length": 2}
    settings |= {"eos_token_id": [2, 999], "bad_words_ids": [[5, 6]], "do_sample": True}
    settings |= {"guidance_scale": 1.5, "num_beam_groups": 2, "diversity_penalty": 0.5}
    settings |= {"num_return_sequences": 1, "dola_layers": None, "own_key": 3}
    settings |= {"stop_strings": "end", "forced_eos_token_id": [2, 3]}
    (source / "generation_config.json").write_text(json.dumps(settings))
    for file in NO_TEXT:
        (source / file).unlink()
    messages: list[str] = []
    model = import_hf(source, tmp_path / "out", on_notice=messages.append)
    text = "\n".join(messages)
    for part in (
        "the option): num_beam_groups 2 (num_groups), diversity_penalty 0.5 (diversity_penalty)",
        "nothing equal: guidance_scale 1.5, do_sample in a beam search",
        "unknown generation settings: own_key",
        "stop_strings, which heedful's beam search does not have",
        "of forced_eos_token_id [2, 3] the first",
        "999",
        "no tokenizer",
    ):
        assert part in text
    for part in ("num_beams", "num_return_sequences", "dola_layers", "min_length", "bad_words"):
        assert part not in text
    import_hf(source, tmp_path / "logged")  # without a function for them
    assert caplog.messages == [f"note: {line}" for line in messages]
    own = {"beam_size": 4, "stop_rule": "heuristic", "min_new_tokens": 2}
    assert model.metadata.options == own
    assert not model.has_tokenizer
    assert model.generate([[5, 6, 2]], max_new_tokens=3)


OWN_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "beam_size": st.integers(1, 4),
        "length_penalty": st.floats(-2, 2) | st.just(0.0),
        "no_repeat_ngram_size": st.integers(0, 3),
        "repetition_penalty": st.floats(0, 2, exclude_min=True),
        "stop_rule": st.sampled_from(["optimal", "beam_full", "heuristic"]),
        "temperature": st.floats(0, 2) | st.just(0.0),
        "top_k": st.integers(1, 60),
        "top_p": st.floats(0, 1, exclude_min=True),
        "min_p": st.floats(0, 1) | st.just(0.0),
        "typical_p": st.floats(0, 1, exclude_min=True),
        "top_h": st.floats(0.1, 1),
        "epsilon_cutoff": st.floats(0, 0.9),
        "eta_cutoff": st.floats(0, 0.9),
        "max_new_tokens": st.integers(5, 9),
        "min_new_tokens": st.integers(2, 5),
        "stop": st.just(["a", "b"]),
        "begin_suppress_tokens": st.just([3, 4]),
        "sequence_bias": st.just([[[3, 4], 2.5], [[5], -1.0]]),
        "exponential_decay_length_penalty": st.just([4, 1.5]),
        "encoder_repetition_penalty": st.floats(0.5, 2),
        "encoder_no_repeat_ngram_size": st.integers(1, 3),
        "renormalize_logits": st.just(True),
    },
)


@given(own=OWN_OPTIONS)
def test_a_model_generates_after_export_and_import_as_before(own: dict[str, Any]) -> None:
    """Any options of its metadata, zeros included."""

    def settled(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        metadata = ModelMetadata("gpt2", "-", options=options)
        model = LanguageModel(
            None, SimpleNamespace(vocab_size=9, max_length=9), metadata, None, None
        )
        selected = model.options()
        left_open = (
            set() if selected.samples else {*SAMPLING_OPTIONS}
        )  # which then are not looked at
        if selected.beam_size == 1:
            left_open |= {"stop_rule"}
        expected = {
            k: v for k, v in vars(selected).items() if k not in left_open | {"draws", "rows"}
        }
        if selected.samples and expected["temperature"] is None:
            expected["temperature"] = 1.0
        return model, expected

    if own.get("beam_size", 1) > 1:
        without = (*SAMPLING_OPTIONS, "stop")
        own = {name: value for name, value in own.items() if name not in without}
    model, before = settled(own)
    content, generation = generation_to_hf(model, "gpt2")
    written = json.loads(
        json.dumps({"config": {"model_type": "gpt2"} | content, "gen": generation})
    )
    after = settled(read_options(HfDirectory(written["config"], written["gen"], {}))[0])[1]
    assert after == before


def test_options_that_the_format_lacks_are_named() -> None:
    """A score without division by the length is one of length penalty 0 there."""
    options = {"beam_size": 4, "normalization": "none", "presence_penalty": 1.5, "num_groups": 1}
    model = model_of("vaswani2017")
    model.metadata = replace(model.metadata, options=options)
    generation = generation_to_hf(model, "marian")[1]
    assert generation is not None
    assert generation["length_penalty"] == 0
    assert lost_options(model) == ["presence_penalty 1.5"]
    model.metadata.options["normalization"] = "gnmt"
    assert lost_options(model) == ["normalization 'gnmt'", "presence_penalty 1.5"]


def test_every_generation_setting_of_transformers_is_imported_or_reported() -> None:
    """A setting that a new version of transformers adds is reported as unknown until it is here."""
    settings = {**vars(transformers.GenerationConfig()), "prompt_lookup_num_tokens": 3}
    assert len(settings) > 60
    _, notices = read_options(HfDirectory({"model_type": "gpt2"}, settings, {}))
    assert notices == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"early_stopping": "always"}, "early_stopping must be false, true or never"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"sequence_bias": [[3, 0.5]]}, "sequence_bias must be a list of pairs"),
        ({"sequence_bias": [[[], 0.5]]}, "no sequence of token ids"),
        ({"exponential_decay_length_penalty": [3]}, "must be a whole number and a number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"encoder_repetition_penalty": 0}, "encoder_repetition_penalty must be a finite number"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be at least 0"),
    ],
)
def test_generation_settings_out_of_range_are_errors_of_the_import(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=rf"generation_config.json.*{says}"):
        read_options(HfDirectory({"model_type": "gpt2"}, settings, {}))


def test_stop_strings_are_imported_where_they_can_be_applied() -> None:
    for settings, has_tokenizer, stop, says in [
        ({"stop_strings": "end"}, True, ["end"], "outputs end before the stop_strings"),
        ({"stop_strings": ["a", "b"]}, True, ["a", "b"], "outputs end before the stop_strings"),
        ({"stop_strings": "end"}, False, None, "stop_strings, which need a tokenizer"),
        ({"stop_strings": "end", "num_beams": 2}, True, None, "beam search does not have"),
    ]:
        directory = HfDirectory({}, settings, {})
        options, [notice] = read_options(directory, has_tokenizer=has_tokenizer)
        assert options.get("stop") == stop
        assert says in notice


def test_lengths_are_imported_as_numbers_of_new_tokens() -> None:
    """EOS included; transformers counts the start token of a decoder, and not EOS."""

    def read(kind: Any, **settings: Any) -> tuple[dict[str, Any], list[str]]:
        options, notices = read_options(HfDirectory({}, settings, {}), kind, longest=64)
        return {name: options[name] for name in options if "new_tokens" in name}, notices

    both = {"max_length": 20, "min_length": 5}
    assert read(Translator, **both) == ({"max_new_tokens": 19, "min_new_tokens": 5}, [])
    assert read(Translator, max_length=64) == ({}, [])
    options, [notice] = read(LanguageModel, **both)
    assert options == {}
    assert "counts the prompt: max_length 20 (max_new_tokens), min_length 5" in notice
    new = {"max_new_tokens": 7, "min_new_tokens": 3}
    assert read(LanguageModel, **both, **new) == ({"max_new_tokens": 7, "min_new_tokens": 4}, [])


def test_missing_sampling_options_have_the_defaults_of_transformers() -> None:
    usual = transformers.GenerationConfig(do_sample=True)
    read, _ = read_options(HfDirectory({"model_type": "gpt2"}, {"do_sample": True}, {}))
    defaults = {"temperature": 1.0, "top_k": 50} | {
        name: value
        for name in ("temperature", "top_k")
        if (value := getattr(usual, name)) is not None
    }
    assert {name: read[name] for name in defaults} == defaults
    assert read.keys() == {"beam_size", "stop_rule", *defaults}


# --- precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "mixtral"])
def test_16_bit_exports_have_equal_outputs_in_transformers(
    name: str, precision: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    model = import_hf(directories[name], tmp_path / "ours")
    export_hf(model, tmp_path / "hf", precision=precision)
    dtype = getattr(torch, precision)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    full = load_file(directories[name] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(torch.equal(weights[key], full[key].to(dtype)) for key in weights.keys() & full)
    reference = auto_class(name).from_pretrained(tmp_path / "hf", dtype="auto").eval()
    assert reference.dtype == dtype
    back = import_hf(tmp_path / "hf", tmp_path / "back")
    for ours, rounded in zip(model.net.parameters(), back.net.parameters(), strict=True):
        assert torch.equal(ours.to(dtype).float(), rounded)
    ids = torch.tensor([[5, 9, 11, 7]])
    both = {"decoder_input_ids": ids} if name == "t5" else {}
    with torch.no_grad():
        theirs_out = reference.float()(input_ids=ids, **both).logits
        ours_out = back.net(ids, ids) if both else back.net(ids)
    torch.testing.assert_close(ours_out, theirs_out, rtol=1e-4, atol=1e-4)


def test_a_precision_that_a_format_does_not_support_is_refused(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    model = import_hf(directories["gpt2"], tmp_path / "ours")
    with pytest.raises(UserError, match="must be float32, bfloat16, float16, not int8"):
        export_hf(model, tmp_path / "hf", precision="int8")
    with pytest.raises(UserError, match="must be float32, bfloat16, int8, not float16"):
        export_ctranslate2(model, tmp_path / "hf", precision="float16")
    with torch.no_grad():
        model.net.decoder.final_norm.weight[0] = 1e5
    with pytest.raises(UserError, match=r"ln_f\.weight has values out of the range of float16"):
        export_hf(model, tmp_path / "hf", precision="float16")
    export_hf(model, tmp_path / "hf", precision="bfloat16")


# --- labels ---------------------------------------------------------------------------------


def with_config(directory: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(directory, to)
    content = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(content))
    return to


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"0": "a", "1": "b", "3": "c"}, "must name the classes 0 to 2"),
        ({"0": "a", "1": "b", "2": "a"}, "two classes the same name: a, b, a"),
    ],
)
def test_duplicate_labels_are_refused(
    labels: dict[str, str], message: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    source = with_config(directories["bert-classes"], tmp_path / "theirs", id2label=labels)
    with pytest.raises(UserError, match=message):
        import_hf(source, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def test_a_new_head_has_the_names_of_transformers(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    messages: list[str] = []
    model = import_hf(
        directories["bert"],
        tmp_path / "out",
        on_notice=messages.append,
        head="classify",
        num_labels=4,
    )
    assert model.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")
    assert any("left as initialized" in line for line in messages)


PROBLEMS = {
    "multi_label_classification": "multi_label",
    "regression": "regression",
    "single_label_classification": "single_label",
}


@pytest.mark.parametrize(
    ("problem", "num_labels"),
    [
        *((problem, 3) for problem in (*PROBLEMS, None)),
        *((problem, 1) for problem in ("multi_label_classification", "regression", None)),
    ],
)
def test_a_classifier_says_what_the_pipeline_of_transformers_says(
    problem: str | None, num_labels: int, tmp_path: Path
) -> None:
    labels = {"id2label": dict(list(LABELS.items())[:num_labels]), "problem_type": problem}
    sizes = BERT.sizes | {"vocab_size": VOCAB, "max_position_embeddings": 48, "pad_token_id": 0}
    net = random_hf(BERT.classify_class, BERT.hf_config(**sizes, **labels))
    net.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tokenizer_of("bert"), tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours")
    model = load_classifier(tmp_path / "ours", device="cpu")
    expected_problem = "multi_label" if num_labels == 1 else "single_label"
    if problem in ("regression", "multi_label_classification"):
        expected_problem = PROBLEMS[problem]
    assert model.metadata.problem == expected_problem
    export_hf(model, tmp_path / "hf")
    assert load(tmp_path / "hf").metadata == model.metadata
    texts = ["the cat sat", "a dog ran home"]
    for folder in ("theirs", "hf"):
        pipeline = transformers.pipeline("text-classification", str(tmp_path / folder), top_k=None)
        for result, scores in zip(model.classify(texts), pipeline(texts), strict=True):
            theirs = {item["label"]: item["score"] for item in scores}
            assert result.scores == pytest.approx(theirs, abs=1e-5)
            if expected_problem == "regression":
                assert (result.label, result.labels, result.probabilities) == ("", (), {})
                continue
            assert (result.label, result.probability) == max(
                result.probabilities.items(), key=lambda item: item[1]
            )
            chosen = {name for name, value in theirs.items() if value >= 0.5}
            is_multi = expected_problem == "multi_label"
            assert set(result.labels) == (chosen if is_multi else {result.label})


def test_an_unknown_problem_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    source = with_config(directories["bert-classes"], tmp_path / "a", problem_type="ranking")
    with pytest.raises(UserError, match="problem_type is 'ranking'; supported: single_label_cla"):
        import_hf(source, tmp_path / "out")


# --- refused input, and files that remain -----------------------------------------------------


WEIGHT = "transformer.h.1.mlp.c_fc.weight"
# Parts of the error for a directory with other tensors, or with a file of this content.
OTHER_TENSORS: dict[str, dict[str, torch.Tensor | None]] = {
    "not in the model: transformer.stray": {"transformer.stray": torch.zeros(2)},
    f"lacks the tensor {WEIGHT}": {WEIGHT: None},
    f"{WEIGHT} is (3, 4)": {WEIGHT: torch.zeros(3, 4)},
}
OTHER_FILES = {
    "the model type mamba is not supported": ("config.json", {"model_type": "mamba"}),
    "tokenizer.json is not JSON": ("tokenizer.json", None),
    "tokenizer.json is damaged": ("tokenizer.json", {"version": "1.0", "model": {"type": "BPE"}}),
}


@pytest.mark.parametrize("message", ["pickled", *OTHER_TENSORS, *OTHER_FILES])
def test_a_broken_directory_is_refused_and_nothing_is_written(
    message: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "theirs"
    shutil.copytree(directories["gpt2"], source)
    weights = source / "model.safetensors"
    if message in OTHER_FILES:
        name, content = OTHER_FILES[message]
        (source / name).write_text("{" if content is None else json.dumps(content))
    elif message in OTHER_TENSORS:
        save_file(changed(load_file(weights), OTHER_TENSORS[message]), weights)
    else:
        weights.rename(source / "pytorch_model.bin")
    for read in (load, lambda path: import_hf(path, tmp_path / "out")):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            read(source)
        assert "\n" not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "function",
    ["zoo.hf.uninitialized_net", "zoo.hf.from_hf", "pipelines.hf_models.open_net"],
)
def test_internal_errors_are_not_reported_as_a_damaged_directory(
    function: str, directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **keys: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(f"heedful.{function}", fails)
    with pytest.raises(TypeError, match="ours"):
        import_hf(directories["gpt2"], tmp_path / "out")


def test_only_a_model_is_replaced_and_only_with_overwrite(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """Both formats have equal file names: an export must never replace its own source."""
    model = import_hf(directories["gpt2"], tmp_path / "ours")
    export_hf(model, tmp_path / "hf")
    before = tree(tmp_path)
    import_hf(directories["gpt2"], tmp_path / "ours", overwrite=True)  # once more is no harm
    export_hf(model, tmp_path / "hf", overwrite=True)
    for call in (
        lambda: export_hf(model, tmp_path / "ours"),
        lambda: import_hf(directories["gpt2"], tmp_path / "ours"),
        lambda: import_hf(tmp_path / "hf", tmp_path / "hf", overwrite=True),
        lambda: import_hf(tmp_path / "hf", tmp_path, overwrite=True),
    ):
        with pytest.raises(UserError, match="name a"):
            call()
    assert tree(tmp_path) == before
    (tmp_path / "ours" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        import_hf(directories["gpt2"], tmp_path / "ours", overwrite=True)
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        export_hf(model, tmp_path / "ours", overwrite=True)
