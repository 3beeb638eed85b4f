"""M2M100, NLLB and mBART-50: tokens of languages before sources and targets, as in transformers."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib import request

import pytest
import torch
import transformers

from heedful.adaptation import Adaptation, Adapted, adapt, stages
from heedful.backends.base import Settings
from heedful.backends.registry import open_conversion
from heedful.config import parse_recipe
from heedful.data.columns import open_columns
from heedful.data.hf_tokenizers import read_tokenizer
from heedful.data.prepared import cache_folder
from heedful.deploy.convert import convert_model
from heedful.errors import UserError
from heedful.export.hf import export_hf, import_hf
from heedful.pipelines import load
from heedful.run import train
from many_languages import KINDS, LINES, make_model

TEXTS = [*LINES[:4], "The ☃ fox"]


class Imported(NamedTuple):
    """A model of transformers with its tokenizer, and the same of heedful."""

    kind: str
    directory: Path
    reference: Any
    tokenizer: Any
    model: Any


@pytest.fixture(scope="module", params=KINDS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    directory = tmp_path_factory.mktemp(request.param)
    reference = make_model(request.param, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "hf")
    model = import_hf(directory / "hf", directory / "ours")
    return Imported(request.param, directory, reference, tokenizer, model)


@torch.no_grad()
def test_ids_losses_and_outputs_equal_transformers(imported: Imported) -> None:
    """From English into German; the languages are given by their tags in other forms."""
    kind, _, reference, tokenizer, model = imported
    en, de, _ = KINDS[kind][2]
    tokenizer.src_lang, tokenizer.tgt_lang = en, de
    languages: Any = {"src_language": "en-GB", "tgt_language": "de"}
    for text, target in zip(TEXTS, reversed(TEXTS), strict=True):
        inputs, labels = tokenizer(text, return_tensors="pt"), tokenizer(text_target=target)
        src, tgt = model.pair_ids([text], [target], **languages)
        assert (
            src == inputs.input_ids.tolist() == model.prompt_ids([text], model.options(**languages))
        )
        assert tgt == [labels.input_ids]
        loss = reference(**inputs, labels=torch.tensor([labels.input_ids])).loss
        [score] = model.score([text], [target], **languages)
        assert -score.log_prob / score.num_tokens == pytest.approx(float(loss), abs=1e-5)
        for beams in (1, 3):
            found = reference.generate(
                **inputs, num_beams=beams, max_new_tokens=7, forced_bos_token_id=tgt[0][0]
            )
            options = {**languages, "beam_size": beams, "max_new_tokens": 7}
            output = model.translate(text, return_details=True, **options)[0]
            assert output.ids == found[0, 1:].tolist()
            assert de not in output.text


def test_an_export_is_the_same_model_in_transformers(imported: Imported, tmp_path: Path) -> None:
    kind, _, reference, tokenizer, model = imported
    model.metadata = replace(model.metadata, src_language="de", tgt_language="zh")
    export_hf(model, tmp_path / "hf")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    _, de, zh = KINDS[kind][2]
    assert (type(back), back.src_lang) == (type(tokenizer), de)
    tokenizer.src_lang = de
    assert back(TEXTS).input_ids == tokenizer(TEXTS).input_ids
    again, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    target = model.pair_ids(["a"], ["a"])[1][0][0]
    assert again.generation_config.forced_bos_token_id == target
    opened = import_hf(tmp_path / "hf", tmp_path / "again")
    assert opened.metadata == replace(model.metadata, src_language=de, tgt_language=zh)
    assert opened.src_tokenizer.content() == model.src_tokenizer.content()
    card = (tmp_path / "hf/README.md").read_text()
    assert "forced_bos_token_id=target" in card
    model.metadata = replace(model.metadata, src_language=None, tgt_language=None)


def test_a_sentencepiece_model_alone_has_the_same_ids(imported: Imported) -> None:
    whole, alone = (read_tokenizer(imported.directory / name) for name in ("hf", "spm"))
    assert whole is not None
    assert alone is not None
    assert (alone.specials, alone.special_ids) == (whole.specials, whole.special_ids)
    assert alone.encode_batch(TEXTS) == whole.encode_batch(TEXTS)
    assert (alone.prefix_ids, alone.suffix_ids) == (whole.prefix_ids, whole.suffix_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tgt_language": "de"}, "languages: give one as src_language=CODE, such as"),
        ({"src_language": "en"}, "languages: give one as tgt_language=CODE, such as"),
        ({"src_language": "en", "tgt_language": "tlh"}, "no tgt_language tlh: this model has"),
        ({"src_language": "tlh", "tgt_language": "en"}, "no src_language tlh: this model has"),
    ],
)
def test_a_language_that_is_missing_or_unknown_is_refused(
    options: Any, message: str, imported: Imported
) -> None:
    model = imported.model
    model.metadata = replace(model.metadata, src_language=None, tgt_language=None)
    with pytest.raises(UserError, match=message):
        model.translate("a", **options)
    with pytest.raises(UserError, match="src_language is for texts; begin lists of ids"):
        model.translate([[5, 2]], src_language="en")
    row = model.prompt_ids(["The fox"], model.options(src_language="en"))
    keys = {"tgt_language": "de", "max_new_tokens": 3}
    assert model.translate(row, **keys)[0][0] == model.target_ids("a", model.options(**keys))[0]


def test_a_glossary_is_of_the_languages_of_the_call(imported: Imported, tmp_path: Path) -> None:
    """Those that are given, or the model's own, for which a missing term is searched for."""
    model, path = imported.model, tmp_path / "terms.tbx"
    path.write_text(
        '<martif><text><body><termEntry><langSet xml:lang="en"><tig><term>fox</term></tig>'
        '</langSet><langSet xml:lang="de"><tig><term>Männer</term></tig></langSet></termEntry>'
        "</body></text></martif>",
        encoding="utf-8",
    )
    languages: Any = {"src_language": "en", "tgt_language": "de"}
    keys: Any = {"glossary": path, "max_new_tokens": 8, "return_details": True}
    [found] = model.translate("The fox", **languages, **keys)
    assert "Männer" in found.text
    plain = model.metadata
    model.metadata = replace(plain, **languages)
    try:
        assert model.translate("The fox", **keys) == [found]
    finally:
        model.metadata = plain


def test_a_segment_in_another_language_than_its_document_is_to_review(
    imported: Imported, tmp_path: Path, commands: Any
) -> None:
    pytest.importorskip("py3langid", reason="py3langid is not installed")
    texts = [
        "The quick fox jumps over the lazy dog.",
        "Zwei junge Männer stehen vor dem Haus und reden miteinander.",
    ]
    units = "".join(
        f'<trans-unit id="{n}"><source>{text}</source></trans-unit>' for n, text in enumerate(texts)
    )
    path = tmp_path / "a.xlf"
    path.write_text(
        '<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file original="a" '
        f'source-language="en" target-language="zh" datatype="x"><body>{units}</body></file>'
        "</xliff>",
        encoding="utf-8",
    )
    model = imported.directory / "ours"
    memory, output = tmp_path / "memory.csv", tmp_path / "b.xlf"
    memory.write_text("en,zh\n" + "".join(f"{text},x\n" for text in texts), encoding="utf-8")
    words = ("-i", path, "-o", output, "--memory", memory)
    result = commands.run("translate", model, *words)
    assert result.code == 0, result.err
    assert output.read_text(encoding="utf-8").count("the text is in de, not in en") == 1


def test_an_adaptation_is_of_languages_that_the_adapted_model_then_has(
    imported: Imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, memory = imported.directory / "ours", tmp_path / "memory.tsv"
    memory.write_text("en\tde\n" + "".join(f"fox {n}\tder {n}\n" for n in range(120)))
    with pytest.raises(UserError, match=r"languages: set data\.src_language and"):
        adapt(folder, Adaptation([memory]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    trained: list[Any] = []

    def concluded(model: Any, *_: Any) -> Adapted:
        trained.append(model)
        return Adapted(tmp_path / "out", 1.0, {}, {})

    def untrained(*_: Any) -> Any:
        return SimpleNamespace(reason="done")

    monkeypatch.setattr(stages, "_begin", lambda *_: (None, {}))
    monkeypatch.setattr(stages, "_conclude", concluded)
    (tmp_path / "out").mkdir()
    changes = {"data.src_language": "en", "data.tgt_language": "de"}
    adapt(folder, Adaptation([memory], changes=changes), tmp_path / "out", untrained)
    [model] = trained
    assert model.translate("The fox", max_new_tokens=3) == model.translate(
        "The fox", max_new_tokens=3, src_language="en", tgt_language="de"
    )


def test_fine_tuning_begins_targets_with_the_token_of_their_language(
    imported: Imported, tmp_path: Path
) -> None:
    """And the trained model still has all languages."""
    kind, directory, _, tokenizer, _ = imported
    en, de, zh = KINDS[kind][2]
    pairs = [("The quick fox", "Büsche"), ("the dog", "Männer stehen")]
    for name, rows in {"de": pairs, "zh": pairs[::-1]}.items():
        path = tmp_path / f"{name}.tsv"
        path.write_text("".join(f"{src} {name}\t{tgt}\n" for src, tgt in rows))
    corpora = {
        name: {"file": str(tmp_path / f"{name}.tsv"), "tgt_language": name} for name in ("de", "zh")
    }
    content: dict[str, Any] = {
        "task": "translation",
        "init_from": str(directory / "ours"),
        "data": {"corpora": corpora, "src_language": "en", "max_length": 30, "valid_size": 2},
        "training": {"max_steps": 1, "device": "cpu", "schedule": {"learning_rate": 1e-3}},
        "evaluation": {"decode_sentences": 2, "final_beam_size": 1, "beam_size": 1},
    }
    train(parse_recipe(content), tmp_path / "run")
    trained: Any = load(tmp_path / "run", device="cpu")
    name = json.loads((tmp_path / "run/run.json").read_text())["data"]
    columns = open_columns(cache_folder() / name / "train")
    tokenizer.src_lang = en
    firsts = set()
    for row in range(len(columns)):
        src = columns.sequences("src")[row].tolist()
        assert src == tokenizer(trained.src_tokenizer.decode(src)).input_ids
        firsts.add(columns.sequences("tgt")[row].tolist()[0])
    tokens = trained.metadata.language_codes
    assert firsts == {tokenizer.convert_tokens_to_ids(tokens[code]) for code in (de, zh)}
    assert (trained.metadata.src_language, trained.metadata.tgt_language) == ("en", None)
    assert trained.ids.decoder_start_ids == (2,)
    [output] = trained.translate(["The fox"], tgt_language="zh", return_details=True)[0]
    assert output.ids[0] == tokenizer.convert_tokens_to_ids(tokens[zh])
    del content["data"]["src_language"]
    with pytest.raises(UserError, match=r"data\.corpora\.de\.src_language is not given"):
        train(parse_recipe(content), tmp_path / "other")


def test_ctranslate2_translates_into_the_same_language(imported: Imported, tmp_path: Path) -> None:
    model, options = imported.model, {"src_language": "en", "tgt_language": "de"}
    plain = model.translate(TEXTS, max_new_tokens=9, beam_size=1, **options)
    facts = convert_model(model, tmp_path, "float32")
    settings = Settings(threads=1)
    model.backend = open_conversion(tmp_path, tmp_path, "ctranslate2", "float32", facts, settings)
    model.backend_is_named = True
    try:
        assert model.translate(TEXTS, max_new_tokens=9, beam_size=1, **options) == plain
    finally:
        model.backend, model.backend_is_named = None, False


@pytest.mark.parametrize("imported", ["nllb"], indirect=True)
def test_a_server_and_a_command_choose_both_languages(imported: Imported, commands: Any) -> None:
    from running_server import running

    def call(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with request.urlopen(request.Request(server.url + path, data, headers)) as answer:
            return json.loads(answer.read())

    model, text = imported.model, "Zwei junge Männer stehen im Freien"
    options = {"src_language": "de", "tgt_language": "en"}
    expected = model.translate(text, **options)
    with running({"nllb": model}) as server:
        [german] = [entry for entry in call("/languages") if entry["code"] == "deu_Latn"]
        assert (german["name"], {"eng_Latn", "zho_Hant"} <= {*german["targets"]}) == (
            "German",
            True,
        )
        for source in ("de", "auto"):
            body = {"q": text, "source": source, "target": "en"}
            answer = call("/translate", body)
            assert answer["translatedText"] == expected
        assert answer["detectedLanguage"]["language"] == "deu_Latn"
    outcome = commands.run(
        *("translate", imported.directory / "ours", text, "--src-lang", "de", "--tgt-lang", "en")
    )
    assert outcome.out.strip() == expected.strip()
    outcome = commands.run("translate", imported.directory / "ours", text, "--tgt-lang", "en")
    assert outcome.code == 2
    assert "give one as --src-lang CODE" in outcome.err
