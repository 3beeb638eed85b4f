"""Several corpora: ranges, tags, weights, shares and scores by corpus, languages at use."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

import heedful
from encoder_runs import PreparedTask, assert_resumes, recipe_of, sentences, write
from heedful.cli.app import make_app
from heedful.config import Recipe, parse_recipe
from heedful.data.columns import Columns, pack_ids, rows_of
from heedful.data.draws import EpochDraw
from heedful.data.plans import plan_batches, plan_windows
from heedful.data.reports import DataReport
from heedful.data.special_tokens import allow_in_texts, tag_id
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.dry_run import estimate_run
from heedful.errors import UserError
from heedful.export.hf import export_hf
from heedful.plan.work import Work
from heedful.run import train
from heedful.tasks import epochs as tasks_epochs
from heedful.tasks.corpora import corpus_shares, language_tags
from heedful.tasks.epochs import EpochBatches, corpus_tokens
from heedful.tasks.run_data import Inherited
from heedful.tasks.translation import Translation
from heedful.training.events import Evaluated, RunStarted, StepDone
from heedful.training.listeners import read_log
from heedful.training.run_report import write_run_report

SIZES = {"de": 40, "fr": 24, "back": 30}
TAGS = {"de": ["<2de>"], "fr": ["<2fr>"], "back": ["<2de>", "<bt>"]}


def many_to_many(folder: Path, **changes: Any) -> Recipe:
    """English words into reversed words, and into doubled ones; the third corpus has src_tag."""
    lines = sentences(sum(SIZES.values()) + 16)
    corpora: dict[str, Any] = {}
    start = 0
    for name, size in SIZES.items():
        src, start = lines[start : start + size], start + size
        target = [
            " ".join(word * (2 if name == "fr" else 1) for word in line.split()) for line in src
        ]
        corpora[name] = {
            "src": write(folder / f"{name}.src", [f"{name} {line}" for line in src]),
            "tgt": write(folder / f"{name}.tgt", target),
            "tgt_tag": "<2fr>" if name == "fr" else "<2de>",
            "tgt_language": "fr" if name == "fr" else "de",
        }
    corpora["back"] |= {"src_tag": "<bt>", "weight": 0.5}
    for name, count in (("de", 8), ("fr", 4)):
        held_out, start = lines[start : start + count], start + count
        corpora[name]["valid"] = {
            "src": write(folder / f"{name}.v.src", [f"held {name} {line}" for line in held_out]),
            "tgt": write(folder / f"{name}.v.tgt", held_out),
        }
    content = recipe_of("translation", folder).model_dump(exclude_unset=True)
    content["data"] = {"corpora": corpora, "src_language": "en", "max_length": 32}
    recipe = parse_recipe(content)
    return recipe.replace(changes) if changes else recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return many_to_many(tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def prepared(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    return PreparedTask(recipe, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"training.max_steps": 6, "training.evaluate_every": 3, "training.log_every": 2}
    out = tmp_path_factory.mktemp("run") / "run"
    train(recipe.replace(keys), out, progress=False)
    return out


def test_corpora_are_ranges_of_the_columns_in_the_order_of_the_recipe(prepared) -> None:
    assert [tuple(c) for c in prepared.data.splits["train"].corpora] == [
        ("de", 0, 40), ("fr", 40, 64), ("back", 64, 94)
    ]  # fmt: skip
    assert [tuple(c) for c in prepared.data.splits["valid"].corpora] == [
        ("de", 0, 8),
        ("fr", 8, 12),
    ]
    assert {"corpora.de.valid", "corpora.fr"} <= {
        line.split()[0].removeprefix("data.") for line in prepared.printed_lines
    }


def test_tags_are_the_first_tokens_of_sources_alone(prepared) -> None:
    """And the tokens after them are those of the text without a tag."""
    tokenizer: Tokenizer = prepared.tokenizers[0]
    src, tgt = prepared.data.ids("train", "src"), prepared.data.ids("train", "tgt")
    for corpus in prepared.data.splits["train"].corpora:
        lines = Path(prepared.recipe.data.corpora[corpus.name].src).read_text().splitlines()
        for row, line in zip(range(corpus.start, corpus.end), lines, strict=True):
            tags = [tag_id(tokenizer, tag) for tag in TAGS[corpus.name]]
            assert src[row].tolist() == [*tags, *tokenizer.encode(line), tokenizer.eos_id]
            assert not set(tgt[row].tolist()) & {
                tag_id(tokenizer, tag) for tag in ("<2de>", "<2fr>", "<bt>")
            }
    assert tokenizer.encode("<2de>") != [tag_id(tokenizer, "<2de>")], "no text contains a tag"
    counts = prepared.data.splits["train"].report.counts["src"]
    num_tags = sum(len(TAGS[name]) * size for name, size in SIZES.items())
    assert counts.tokens == len(src.ids) - len(src) - num_tags, "tags are special tokens"


def test_one_corpus_has_the_plan_of_today_bit_by_bit(tmp_path) -> None:
    plain = recipe_of("translation", tmp_path)
    files = plain.data.train.model_dump(exclude_unset=True)
    content = plain.model_dump(exclude_unset=True)
    del content["data"]["train"]
    named = parse_recipe(content | {"data": content["data"] | {"corpora": {"one": files}}})
    old, new = (PreparedTask(r, tmp_path / "data") for r in (plain, named))
    for epoch in range(3):
        plans = [run.plan_epoch(epoch) for run in (old, new)]
        assert [b.tolist() for b in plans[0]] == [b.tolist() for b in plans[1]]
    for split in ("train", "valid"):
        for side in ("src", "tgt"):
            a, b = (run.data.ids(split, side) for run in (old, new))
            assert (a.ids.tolist(), a.offsets.tolist()) == (b.ids.tolist(), b.offsets.tolist())


def test_the_plan_reads_each_corpus_by_its_weight(prepared) -> None:
    columns = prepared.data.splits["train"]
    seen = np.zeros(len(columns), int)
    for epoch in range(2):
        rows = np.concatenate(prepared.plan_epoch(epoch))
        counts = [np.sum((rows >= c.start) & (rows < c.end)) for c in columns.corpora]
        assert counts == [40, 24, 15]
        seen += np.bincount(rows, minlength=len(columns))
    assert seen.tolist() == [2] * 64 + [1] * 30
    settings = prepared.recipe.training
    shares = corpus_shares(prepared.recipe, columns.corpora)
    draw = EpochDraw(shares, seed=settings.seed, epoch=1)
    rows = draw.rows(0, len(draw))
    lengths = [prepared.data.ids("train", side).lengths[rows] for side in ("src", "tgt")]
    limits = {"max_tokens": settings.batch_tokens, "max_sentences": settings.batch_sentences}
    batches = plan_batches(*lengths, **limits, seed=settings.seed, epoch=1)
    planned = prepared.plan_epoch(1)
    assert [b.tolist() for b in planned] == [rows[b].tolist() for b in batches]


def test_a_temperature_raises_the_share_of_small_corpora(recipe, prepared) -> None:
    ranges = prepared.data.splits["train"].corpora
    warm = recipe.replace({"data.temperature": 5.0, "data.corpora.back.weight": 1.0})
    passes = [float(share.passes[0][1]) for share in corpus_shares(warm, ranges)]
    sizes = np.array([*SIZES.values()])
    shares = sizes ** (1 / 5) / (sizes ** (1 / 5)).sum()
    np.testing.assert_allclose(np.array(passes) * sizes / sizes.sum(), shares, atol=1e-6)
    level = recipe.replace({"data.temperature": 1.0, "data.corpora.back.weight": 2.0})
    assert [float(s.passes[0][1]) for s in corpus_shares(level, ranges)] == [1, 1, 2]


def test_an_output_with_a_line_break_is_one_line_of_the_file(
    prepared, run, tmp_path, monkeypatch, caplog
) -> None:
    prepared.model = heedful.load(run, backend="eager")
    decode = prepared.task.decode

    def with_breaks(*arguments):
        outputs, scores = decode(*arguments)
        return [f"{output}\nx" for output in outputs], scores

    monkeypatch.setattr(prepared.task, "decode", with_breaks)
    prepared.compute_final_scores(tmp_path)
    lines = (tmp_path / "valid.output.txt").read_text().splitlines()
    assert len(lines) == len(prepared.data.texts("valid"))
    assert all(line.endswith(" x") for line in lines)
    assert f"outputs with line breaks, each written as a space: {len(lines)}" in caplog.text


def test_final_scores_ask_for_the_language_of_chinese(
    prepared, run, tmp_path, monkeypatch, caplog
) -> None:
    """BLEU took each line for a word, and was about 0 without a word on the cause."""
    prepared.model = heedful.load(run, backend="eager")
    rows = [{"src": "a", "tgt": "今天天气很好。"}]
    monkeypatch.setattr(type(prepared.data), "texts", lambda *arguments: rows)
    for language, is_warned in (("zh", False), (None, True)):
        monkeypatch.setattr(prepared.task, "_tgt_language", lambda row, known=language: known)
        prepared.compute_final_scores(tmp_path)
        assert ("set data.tgt_language to zh or ja" in caplog.text) == is_warned


def test_weights_change_no_prepared_data_and_tags_do(recipe, tmp_path) -> None:
    base = PreparedTask(recipe, tmp_path).data.directory
    for change, is_same in (
        ({"data.corpora.de.weight": [[0, 3.0], [2, 0.1]], "data.temperature": 2.0}, True),
        ({"data.corpora.back.src_tag": "<synthetic>"}, False),
        ({"data.corpora.fr.tgt": recipe.data.corpora["fr"].src}, False),
    ):
        assert (PreparedTask(recipe.replace(change), tmp_path).data.directory == base) == is_same


def test_the_losses_of_corpora_add_up_to_that_of_all(prepared, run, tmp_path) -> None:
    prepared.model = heedful.load(run, backend="eager")
    result = prepared.evaluate()
    assert result.corpora.keys() == {"de", "fr"}
    targets = prepared.data.ids("valid", "tgt").lengths
    sums = {"de": targets[:8].sum(), "fr": targets[8:].sum()}
    mean = sum(result.corpora[name] * size for name, size in sums.items()) / sum(sums.values())
    assert mean == pytest.approx(np.log(result.perplexity), rel=1e-6)
    sources = [sample.source.split()[1] for sample in result.samples]
    assert sources == ["de", "fr"], "the first of each corpus"
    scores = prepared.compute_final_scores(tmp_path)
    content = json.loads((tmp_path / "scores.json").read_text())
    assert {"chrf", "chrf/de", "chrf/fr"} <= content["scores"].keys() == scores.by_name.keys()
    lines = (tmp_path / "valid.output.txt").read_text().splitlines()
    references = [row["tgt"] for row in prepared.data.texts("valid")]
    from sacrebleu import corpus_chrf

    expected = corpus_chrf(lines[8:], [references[8:]]).score
    assert content["scores"]["chrf/fr"]["score"] == pytest.approx(expected)
    assert content["scores"]["chrf/fr"]["name"].endswith(", fr")


def test_a_run_of_corpora_whose_weights_change_resumes_exactly(recipe, tmp_path) -> None:
    """And knows its steps: the schedule of rates ends with the last epoch."""
    keys = {
        "data.corpora.de.weight": [[0, 0.5], [2, 0.9]],
        "data.corpora.back.weight": [[0, 1.0], [1, 0.0]],
        "training.max_steps": 12,
        "training.evaluate_every": 4,
        "training.log_every": 1,
    }
    changed = recipe.replace(keys)
    assert_resumes(changed, tmp_path, ())
    run = PreparedTask(changed.replace({"training.max_epochs": 4}), tmp_path / "data")
    batches = EpochBatches(run.task, run.data)
    sizes = [len(batches.plan_epoch(epoch)) for epoch in range(4)]
    assert sizes[0] > sizes[1] < sizes[3]
    ends = {"training.max_epochs": 4, "training.max_steps": None}
    without = PreparedTask(changed.replace(ends), tmp_path / "data")
    assert EpochBatches(without.task, without.data).total_steps() == sum(sizes)
    assert PreparedTask(recipe, tmp_path / "data").data.directory == run.data.directory


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([[1, 1]], "begin at epoch 0 and ascend.*not .*1, 1"),
        ([[0, 1], [0, 2]], "begin at epoch 0 and ascend"),
        ([[0, 0], [5, 0]], r"de\.weight: a corpus of weight .* never read"),
        ([[0, -1], [5, 1]], r"data\.corpora\.de\.weight"),
    ],
)
def test_weights_by_epoch_that_cannot_be_honored_are_refused(recipe, weight, message) -> None:
    with pytest.raises(UserError, match=message):
        recipe.replace({"data.corpora.de.weight": weight})


def test_a_run_logs_the_share_and_the_loss_of_each_corpus(run: Path) -> None:
    events = read_log(run / "log.jsonl")
    steps = [event for event in events if isinstance(event, StepDone)]
    assert all(event.corpora.keys() == SIZES.keys() for event in steps)
    assert all(sum(event.corpora.values()) == pytest.approx(1) for event in steps)
    assert steps[0].corpora["de"] > steps[0].corpora["back"]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    assert all(event.corpora.keys() == {"de", "fr"} for event in evaluations)
    write_run_report(run)
    page = (run / "report.html").read_text()
    for text in ("Held-out loss by corpus", "share of tokens", "&lt;2de&gt; &lt;bt&gt;"):
        assert text in page


def test_a_model_translates_into_the_language_that_is_asked_for(run: Path, recipe: Recipe) -> None:
    model = heedful.load(run, backend="eager")
    assert model.metadata.language_tags == {"de": "<2de>", "fr": "<2fr>"} == language_tags(recipe)
    texts = sentences(3)
    tokenizer = model.src_tokenizer
    for language in ("de", "fr"):
        rows = [
            [tag_id(tokenizer, f"<2{language}>"), *tokenizer.encode(text), tokenizer.eos_id]
            for text in texts
        ]
        assert model.prompt_ids(texts, model.options(tgt_language=language)) == rows
        outputs = model.translate(texts, tgt_language=language)
        assert outputs == tokenizer.decode_batch(model.generate(rows))
        assert model.pair_ids(texts, texts, tgt_language=language)[0] == rows
        assert model.score(texts, texts, tgt_language=language)[0].log_prob < 0
        shown = CliRunner().invoke(
            make_app(["translate"]),
            ["translate", str(run), "--backend", "eager", "--tgt-lang", language, *texts],
        )
        assert shown.stdout.splitlines() == outputs
    for options, message in (
        ({}, "translates into de, fr: give one as tgt_language"),
        ({"tgt_language": "es"}, "no tgt_language es: this model translates into de, fr"),
    ):
        with pytest.raises(UserError, match=message):
            model.translate(texts, **options)
        with pytest.raises(UserError, match=message):
            model.score(texts, texts, **options)
    with pytest.raises(UserError, match="tgt_language is for texts"):
        model.translate([[5, 2]], tgt_language="de")


def test_tags_are_plain_tokens_of_other_programs(run: Path, tmp_path: Path) -> None:
    """A CTranslate2 model of the same weights, given the tag as a token, has the same scores;
    exported tokenizers read it in a text."""
    model, texts = heedful.load(run, backend="eager"), sentences(4)
    result = CliRunner().invoke(
        make_app(["export"]), ["export", "ctranslate2", str(run), str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    import ctranslate2

    translator = ctranslate2.Translator(str(tmp_path / "out"), device="cpu")
    tokenizer = model.src_tokenizer
    rows = model.prompt_ids(texts, model.options(tgt_language="fr"))
    tokens = [[tokenizer.piece(i) for i in row[:-1]] for row in rows]
    assert {row[0] for row in tokens} == {"<2fr>"}
    file = BackendTokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = [file.encode(f"<2fr> {text}").ids for text in texts]
    assert [[file.id_to_token(i) for i in row] for row in ids] == tokens
    export_hf(model, tmp_path / "hf")
    hf = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert [hf(f"<2fr> {text}").input_ids for text in texts] == rows
    assert hf("<bt> red").input_ids != hf("<2fr> red").input_ids
    targets = sentences(8)[4:]
    pieces = [[tokenizer.piece(i) for i in tokenizer.encode(target)] for target in targets]
    theirs = [sum(score.log_probs) for score in translator.score_batch(tokens, pieces)]
    ours, other = (
        [score.log_prob for score in model.score(texts, targets, tgt_language=language)]
        for language in ("fr", "de")
    )
    assert theirs == pytest.approx(ours, abs=1e-4)
    assert theirs != pytest.approx(other, abs=1e-3), "the tag matters"


def test_the_space_after_a_tag_is_not_part_of_the_text() -> None:
    tokenizer = train_tokenizer(
        sentences(9), kind="byte_bpe", vocab_size=280, extra_specials=("<2de>",)
    )
    content = allow_in_texts(tokenizer.content()["tokenizer"], {"<2de>"})
    other = BackendTokenizer.from_str(json.dumps(content))
    ids = [tag_id(tokenizer, "<2de>"), *tokenizer.encode("red dog")]
    assert other.encode("<2de> red dog").ids == ids == other.encode("<2de>red dog").ids


@pytest.mark.parametrize("task", ["language_modeling", "masked_lm", "denoising", "classification"])
def test_tasks_of_texts_read_corpora_too(task: str, tmp_path: Path) -> None:
    plain = recipe_of(task, tmp_path)
    content = plain.model_dump(exclude_unset=True)
    files = content["data"].pop("train")
    content["data"].pop("valid_size", None)
    if task == "classification":
        content["data"]["valid_size"] = 16
    [(key, path)] = [(key, path) for key, path in files.items() if not key.endswith("_field")]
    lines = Path(path).read_text().splitlines()
    parts = {"a": lines[:60], "b": lines[60:]}
    content["data"]["corpora"] = {
        name: {**files, key: write(tmp_path / f"{name}-{Path(path).name}", part)}
        for name, part in parts.items()
    }
    content["data"]["corpora"]["b"]["weight"] = 3
    net = {"language_modeling": "gpt", "denoising": None}.get(task, "bert")
    run = PreparedTask(parse_recipe(content), tmp_path / "data", net)
    columns = run.data.splits["train"]
    assert [corpus.name for corpus in columns.corpora] == ["a", "b"]
    plan = run.plan_epoch(0)
    if task == "language_modeling":
        counts = np.bincount(rows_of(plan[0].order), minlength=len(columns))
        settings = {"context": 8, "batch_size": 4, "seed": 1, "epoch": 2}
        lengths = columns.sequences("text").lengths
        rows = np.arange(len(columns))
        pair = [plan_windows(lengths, **settings, rows=choice) for choice in (None, rows)]
        assert all((a.starts == b.starts).all() for a, b in zip(*pair, strict=True))
    else:
        rows = [getattr(item, "indices", item) for item in plan]
        counts = np.bincount(rows_of(np.concatenate(rows)), minlength=len(columns))
    a, b = columns.corpora
    assert {*counts[a.start : a.end]} == {1}
    assert {*counts[b.start : b.end]} == {3}
    if net is None:
        train(run.recipe.replace({"training.max_steps": 1}), tmp_path / "run", progress=False)
        run.model = heedful.load(tmp_path / "run", backend="eager")
    batches = EpochBatches(run.task, run.data)
    loaded = [batches.load_batch(0, item).corpora for item in batches.plan_epoch(0)]
    tokens = columns.sequences("text").lengths
    if task == "language_modeling":
        sums = {name: sum(counts[name] for counts in loaded) for name in ("a", "b")}
        total = tokens[a.start : a.end].sum() + 3 * tokens[b.start : b.end].sum()
        assert total - 20 < sum(sums.values()) <= total
    else:
        assert sum(counts["a"] for counts in loaded) == tokens[a.start : a.end].sum()
        assert sum(counts["b"] for counts in loaded) == 3 * tokens[b.start : b.end].sum()
    assert run.evaluate().corpora.keys() == {"a", "b"}
    assert {"loss/a", "loss/b"} <= run.compute_final_scores(tmp_path).by_name.keys()


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ("masked_lm", {}),
        ("denoising", {}),
        ("translation", {"training__subword_sampling": 0.5}),
        ("classification", {"training__subword_sampling": 0.5}),
    ],
)
def test_copies_of_a_row_in_an_epoch_have_other_random_numbers(task, keys, tmp_path) -> None:
    """Masks, noise and subword splits, as those of the row in different epochs."""
    if keys:
        keys |= {"tokenizer": {"kind": "bpe", "vocab_size": 35}}
    content = recipe_of(task, tmp_path, **keys).model_dump(exclude_unset=True)
    files = content["data"].pop("train")
    content["data"].pop("valid_size", None)
    content["data"]["max_length"] = 90
    lines = [" ".join(words) for words in np.array(sentences(80)).reshape(16, 5).tolist()]
    ending = "\t{}" if task == "classification" else "{}"
    labels = ["x", "y"] if task == "classification" else ["", ""]
    rows = [line + ending.format(labels[n % 2]) for n, line in enumerate(lines)]
    corpus = {key: write(Path(path), rows) for key, path in files.items()}
    content["data"]["corpora"] = {"a": {**corpus, "weight": 2.5, "valid": corpus}}
    content["data"]["drop_held_out"] = False
    content["training"] |= {"batch_sentences": None, "batch_tokens": 4096}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    epochs = EpochBatches(run.task, run.data)
    seen: dict[int, list[tuple[int, ...]]] = {}
    for planned in epochs.plan_epoch(0):
        batch = epochs.load_batch(0, planned)
        tokens = batch.tokens if batch.source is None else batch.source
        sizes = [tokens.ids.size(1)] if tokens.lengths is None else tokens.lengths.tolist()
        for row, ids, size in zip(batch.indices, tokens.ids.tolist(), sizes, strict=True):
            seen.setdefault(int(row), []).append(tuple(ids[:size]))
    assert {len(copies) for copies in seen.values()} == {2, 3}
    assert len(seen) == 16
    num_copies = sum(len(copies) - 1 for copies in seen.values())
    assert num_copies > 4
    equal = sum(len(copies) - len(set(copies)) for copies in seen.values())
    assert equal <= num_copies // 8


def test_a_source_of_several_corpora_is_on_one_side(tmp_path) -> None:
    """English with German and French, and both directions of German; no row but exchanged pairs
    is dropped."""
    english, german, french = ([f"{word} {n}" for n in range(40)] for word in ("e", "d", "f"))
    sides = {"en": english, "de": german, "fr": french}
    files = {name: write(tmp_path / name, lines) for name, lines in sides.items()}
    content = recipe_of("translation", tmp_path).model_dump(exclude_unset=True)
    content["data"] = {"valid_size": 30, "corpora": {}}
    for src, tgt in (("en", "de"), ("en", "fr"), ("de", "en")):
        corpus = {"src": files[src], "tgt": files[tgt], "tgt_language": tgt}
        content["data"]["corpora"][f"{src}-{tgt}"] = {**corpus, "tgt_tag": f"<2{tgt}>"}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    held = {(row["src"], row["tgt"]) for row in run.data.texts("valid")}
    src, tgt = (run.data.ids("train", side) for side in ("src", "tgt"))
    pairs = {
        (run.tokenizer.decode(a.tolist()), run.tokenizer.decode(b.tolist()))
        for a, b in zip(src, tgt, strict=True)
    }
    assert len(held) == 30
    assert {src for src, _ in held}.isdisjoint({src for src, _ in pairs})
    assert pairs.isdisjoint({(tgt, src) for src, tgt in held})
    num_dropped = run.data.splits["train"].report.num_also_held_out
    assert num_dropped > 0
    assert len(src) == 120 - 30 - num_dropped


def changing(folder: Path) -> Recipe:
    """Two corpora with rows of other lengths, whose weights change by epoch."""
    content = recipe_of("translation", folder).model_dump(exclude_unset=True)
    content["data"] = {"corpora": {}, "max_length": 64, "valid_size": 8}
    lengths = {"short": 2, "long": 20}
    weights = {"short": [[0, 1], [2, 0.25]], "long": [[0, 0.1], [2, 3]]}
    for name, length in lengths.items():
        lines = [" ".join([f"{name}{n}", *["dog"] * length]) for n in range(60)]
        files = {side: write(folder / f"{name}.{side}", lines) for side in ("src", "tgt")}
        content["data"]["corpora"][name] = {**files, "weight": weights[name]}
    content["training"] |= {"batch_sentences": None, "batch_tokens": 200, "max_steps": None}
    content["training"] |= {"max_epochs": 5, "gradient_accumulation": 2, "evaluate_every": 1000}
    content["training"]["schedule"] = {"name": "linear", "learning_rate": 0.01, "warmup_steps": 2}
    return parse_recipe(content)


def test_the_steps_of_epochs_with_other_weights_are_counted(tmp_path, monkeypatch) -> None:
    """In the schedule, the log, the plan and the estimate."""
    recipe = changing(tmp_path)
    train(recipe, tmp_path / "run", progress=False)
    events = read_log(tmp_path / "run" / "log.jsonl")
    start = next(event for event in events if isinstance(event, RunStarted))
    steps = [event for event in events if isinstance(event, StepDone)]
    assert start.total_steps == steps[-1].step
    assert steps[-1].learning_rate == 0
    run = PreparedTask(recipe, tmp_path / "data")
    batches = EpochBatches(run.task, run.data)
    sizes = [-(-len(batches.plan_epoch(epoch)) // 2) for epoch in range(5)]
    assert max(sizes) > 3 * min(sizes)
    assert start.total_steps == sum(sizes)
    assert batches.num_epochs(sum(sizes)) == 5
    assert batches.num_epochs(sizes[0] + sizes[1]) == 2
    work = Work.open(recipe, uses_data=True, print_line=lambda line: None)
    assert work.total_steps == sum(sizes)
    assert estimate_run(recipe, lambda line: None).total_steps == sum(sizes)
    shorter = recipe.replace({"training.max_steps": sizes[0] + 1})
    assert EpochBatches(Translation(shorter), run.data).total_steps() == sizes[0] + 1
    # Of large data an epoch is planned for each set of weights.
    monkeypatch.setattr(tasks_epochs, "_COUNTED_ROWS", 0)
    planned, plan_epoch = list[int](), EpochBatches.plan_epoch
    monkeypatch.setattr(
        EpochBatches, "plan_epoch", lambda self, e: planned.append(e) or plan_epoch(self, e)
    )
    assert EpochBatches(run.task, run.data).total_steps() == pytest.approx(sum(sizes), abs=5)
    assert planned == [0, 2]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_epochs": 3}, 30),
        ({"max_epochs": 3, "gradient_accumulation": 4}, 9),
        ({"max_steps": 7, "max_epochs": 3}, 7),
        ({"max_steps": 31, "max_epochs": 3}, 30),
        ({"max_minutes": 1}, None),
    ],
)
def test_the_steps_of_a_run(keys, steps, tmp_path):
    content = recipe_of("masked_lm", tmp_path).model_dump(exclude_unset=True)
    content["data"]["valid_size"] = 8  # of 80 texts
    ends = {"max_steps": None, "batch_sentences": None, "batch_tokens": 10_000}
    content["training"] |= ends | {"batch_sentences": 8} | keys
    content["training"]["batch_tokens"] = None
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    batches = EpochBatches(run.task, run.data)
    assert len(batches.plan_epoch(0)) == 9
    assert batches.total_steps() == (27 if steps == 30 else steps)


def test_an_existing_tokenizer_that_splits_a_tag_is_refused(recipe, tmp_path) -> None:
    train_tokenizer(sentences(9), kind="char").save(tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    with pytest.raises(UserError, match="the tokenizer has no token <2de>, which it splits"):
        PreparedTask(recipe, tmp_path, inherited=Inherited((tokenizer, tokenizer)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fr.tgt_tag": None}, r"corpora\.fr has no tgt_tag, but corpora of other"),
        ({"back.tgt_tag": "<3de>"}, r"language de has <2de> \(corpus de\) and <3de> \(corpus back"),
        ({"fr.tgt_language": None}, r"corpora\.fr\.tgt_tag <2fr> names a language that is not"),
        ({"de.weight": 0}, r"de\.weight: a corpus of weight 0\.0 is never read"),
        ({"de.tgt": []}, r"corpora\.de names 1 src files but 0 tgt files"),
        ({"fr.src": None, "fr.tgt": None}, r"data\.corpora\.fr: names no files of training rows"),
        (
            {"back.src_tag": "bt"},
            "tag in a new tokenizer has a name in angle brackets, as <2de>, not 'bt'",
        ),
    ],
)
def test_contradictory_corpora_are_refused(recipe, tmp_path, changes, message) -> None:
    def prepare() -> None:
        changed = recipe.replace({f"data.corpora.{key}": value for key, value in changes.items()})
        PreparedTask(changed, tmp_path)

    with pytest.raises(UserError, match=message):
        prepare()


def test_a_corpus_without_rows_is_refused(recipe, tmp_path) -> None:
    """Where all its rows are too long, or held out."""
    long = write(tmp_path / "long", ["word " * 40] * 3)
    keys = {"data.corpora.fr.src": long, "data.corpora.fr.tgt": long}
    with pytest.raises(UserError, match=r"data\.corpora: no row of fr is left to train on"):
        PreparedTask(recipe.replace(keys), tmp_path)


def test_labels_are_no_tokens_of_a_corpus() -> None:
    columns = {"text": pack_ids([[1, 2, 3], [4, 5]], 9), "labels": pack_ids([[0, 1], []], 2)}
    train = Columns(columns, DataReport(2, 2), {"corpora": [("a", 0, 1), ("b", 1, 2)]})
    rows = np.arange(2)
    assert corpus_tokens(train, rows, rows) == {"a": 3, "b": 2}
