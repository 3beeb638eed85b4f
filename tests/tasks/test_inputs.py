"""Files of a recipe: resolution of paths, and removal of held-out rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import tiny
from encoder_runs import PreparedTask, recipe_of, write
from heedful.config import Recipe, parse_recipe
from heedful.errors import UserError
from heedful.recipe_files import RECIPES
from heedful.tasks.corpora import split_files
from heedful.tasks.inputs import rows_per_batch


def in_folder(recipe: Recipe, folder: str | None) -> Recipe:
    """A recipe with file names relative to a folder."""
    content = recipe.model_dump(exclude_unset=True)
    train = content["data"]["train"]
    train |= {key: Path(path).name for key, path in train.items()}
    content["data"]["folder"] = folder
    return parse_recipe(content)


@pytest.mark.parametrize("task", ["translation", "language_modeling", "classification"])
def test_relative_paths_are_in_the_data_folder(task, tmp_path, monkeypatch):
    recipe = recipe_of(task, tmp_path)
    whole = PreparedTask(recipe, tmp_path / "whole").data
    actual = PreparedTask(in_folder(recipe, str(tmp_path)), tmp_path / "folder").data
    name = next(iter(whole.splits["train"].columns))
    assert actual.ids("train", name).ids.tolist() == whole.ids("train", name).ids.tolist()
    with pytest.raises(UserError, match=str(tmp_path / "elsewhere")):
        PreparedTask(in_folder(recipe, str(tmp_path / "elsewhere")), tmp_path / "none")
    monkeypatch.chdir(tmp_path)  # null: the current folder
    PreparedTask(in_folder(recipe, None), tmp_path / "here")


def test_absolute_paths_and_shipped_files_ignore_the_data_folder():
    train = {"text": ["/a/b", "shipped:rhyme.txt", "c"]}
    recipe = parse_recipe(
        {
            "task": "language_modeling",
            "data": {"folder": "there", "train": train},
            "training": {"max_steps": 1},
        }
    )
    assert split_files(recipe)[0].files.text == ["/a/b", str(RECIPES / "rhyme.txt"), "there/c"]


def test_a_column_of_plain_text_is_refused(tmp_path):
    recipe = recipe_of("language_modeling", tmp_path)
    recipe = recipe.replace({"data.train.text_field": "body"})
    with pytest.raises(UserError, match="text_field body is a column of tables"):
        PreparedTask(recipe, tmp_path / "run")


TWICE = ["red dog sees", "old cat sees the cow", "big cow sees"]  # held out, and in training too


@pytest.mark.parametrize(
    "task", ["translation", "language_modeling", "masked_lm", "denoising", "classification"]
)
@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_rows_are_removed_from_training(task, split, tmp_path):
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    files = {key: Path(path) for key, path in content["data"]["train"].items()}
    content["data"].pop("valid_size", None)
    if "text" in files:
        content["data"]["drop_held_out"] = True
    for name, texts in {"valid": ["the cow sees the cow"], split: TWICE}.items():
        content["data"][name] = {}
        for key, path in files.items():
            end = "\tx" if key == "file" else ""
            lines = [text[::-1] if key == "tgt" else f"{text}{end}" for text in texts]
            content["data"][name][key] = write(tmp_path / f"{name}-{path.name}", lines)
            if name == split:
                write(path, [*lines, *lines, *path.read_text().splitlines()])
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    columns = run.data.splits["train"]
    assert columns.report.num_also_held_out == 2 * len(TWICE)
    assert "6 dropped as also held out" in "\n".join(run.printed_lines)
    name = next(iter(columns.columns))
    texts = {run.tokenizer.decode(ids.tolist()) for ids in columns.sequences(name)}
    assert texts.isdisjoint(TWICE)


def test_a_tokenizer_is_trained_on_a_sample_of_the_training_rows(tmp_path):
    """Of which each has a word of its own; all rows are training data."""
    text = write(tmp_path / "words", [f"the w{n}" for n in range(200)])
    sizes = {}
    for size in (50, 1_000):
        keys = {"data__train__text": text, "tokenizer__sample_size": size}
        keys["data__valid__text"] = write(tmp_path / "valid", ["the w1", "the w2"])
        run = PreparedTask(recipe_of("masked_lm", tmp_path, **keys), tmp_path / "data")
        assert run.num_train == 200
        sizes[size] = run.tokenizer.vocab_size - len(run.tokenizer.special_ids)
    assert sizes == {50: 51, 1_000: 201}


TEXT_TASKS = ["language_modeling", "masked_lm", "denoising"]


def play(task: str, folder: Path, **data: Any) -> PreparedTask:
    """A play of 40 speaker lines, each with a spoken line of its own."""
    lines = [line for n in range(40) for line in ("anna :", f"line {n} of the play")]
    content = recipe_of(task, folder, evaluation__num_samples=0).model_dump(exclude_unset=True)
    content["data"] |= {"train": {"text": write(folder / "play", lines)}, **data}
    return PreparedTask(parse_recipe(content), folder / "data")


def speaker_lines(run: PreparedTask, split: str) -> int:
    texts = run.data.ids(split)
    return sum(run.tokenizer.decode(ids.tolist()) == "anna :" for ids in texts)


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_lines_that_recur_in_the_held_out_tail_stay_in_training(task, tmp_path):
    run = play(task, tmp_path)
    assert run.data.splits["train"].report.num_also_held_out == 0
    sides = [speaker_lines(run, split) for split in ("train", "valid")]
    assert sum(sides) == 40
    assert min(sides) > 0
    assert len(run.data.splits["train"]) + len(run.data.splits["valid"]) == 80


@pytest.mark.parametrize("drop", [None, False, True])
@pytest.mark.parametrize("task", ["language_modeling", "denoising"])
def test_the_recipe_says_if_lines_of_validation_files_are_dropped(task, drop, tmp_path):
    """By default not: lines of running text recur."""
    valid = {"text": write(tmp_path / "held", ["anna :", "a line  of the play"])}
    run = play(task, tmp_path, valid=valid, drop_held_out=drop)
    num_dropped = run.data.splits["train"].report.num_also_held_out
    assert (num_dropped, speaker_lines(run, "train")) == ((40, 0) if drop else (0, 40))


def test_a_test_file_is_compared_where_the_tail_is_not(tmp_path):
    test = {"text": write(tmp_path / "test", ["line 3 of  the play"])}
    run = play("masked_lm", tmp_path, test=test, drop_held_out=True)
    assert run.data.splits["train"].report.num_also_held_out == 1
    assert speaker_lines(run, "train") + speaker_lines(run, "valid") == 40


def sources_in(run: PreparedTask, split: str) -> list[str]:
    """The sources of a split, which differ by words alone."""
    rows = run.data.texts(split) if split != "train" else []
    if rows:
        key = next(iter(rows[0]))
        texts = [row[key] for row in rows]
        if key == "messages":
            texts = [json.loads(text)[0]["content"] for text in texts]
        return [" ".join(text.split()) for text in texts]
    name = "src" if "src" in run.data.splits["train"] else "text"
    ids = run.data.ids("train", name)
    if run.recipe.task == "sft":
        texts = [run.tokenizer.decode((row >> 1).tolist()) for row in ids]
        return [text.splitlines()[1] for text in texts]
    return [run.tokenizer.decode(row.tolist()) for row in ids]


@pytest.mark.parametrize("task", ["translation", "classification", "sft"])
def test_all_rows_of_a_source_are_on_one_side(task, tmp_path):
    """Two targets, labels or answers a source, once with other spaces; no row is lost."""
    sources = [f"w{n} x" for n in range(60)]
    twice = [text for source in sources for text in (source, source.replace(" ", "  "))]
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    if task == "translation":
        train = {
            "src": write(tmp_path / "s", twice),
            "tgt": write(tmp_path / "t", [f"t{n}" for n in range(120)]),
        }
    elif task == "classification":
        rows = [f"{text}\t{'xy'[n % 2]}" for n, text in enumerate(twice)]
        train = {"file": write(tmp_path / "s.tsv", rows)}
    else:
        rows = [json.dumps({"prompt": t, "response": f"r{n}"}) for n, t in enumerate(twice)]
        train = {"file": write(tmp_path / "s.jsonl", rows)}
    content["data"] |= {"train": train, "valid_size": 40}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    train_sources, held = (sources_in(run, split) for split in ("train", "valid"))
    assert (len(train_sources), len(held)) == (80, 40)
    train_sources = [" ".join(text.split()) for text in train_sources]
    assert set(train_sources).isdisjoint(held)
    assert run.data.splits["train"].report.num_also_held_out == 0


@pytest.mark.parametrize(
    ("held", "num_dropped"),
    [
        ("red dog\tother", 1),  # another target or label
        ("red   dog\tx", 1),
        ("\uff52ed\u00a0dog\tx", 1),  # a full-width letter, a no-break space
        ("\ufeffred do\u00adg\u200b\x00\tx", 1),  # what is not displayed
        ("Red dog\tx", 0),
        ("red dogs\tx", 0),
    ],
)
@pytest.mark.parametrize("drop", [None, False])
@pytest.mark.parametrize("task", ["translation", "classification"])
def test_training_rows_with_a_held_out_source_are_dropped(task, drop, held, num_dropped, tmp_path):
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    del content["data"]["valid_size"]
    rows = ["red dog\tx", "old cat\tother", "big cow\tx"]
    files = {"train": write(tmp_path / "t.tsv", rows), "valid": write(tmp_path / "v.tsv", [held])}
    content["data"] |= {name: {"file": file} for name, file in files.items()}
    content["data"]["drop_held_out"] = drop
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    expected = 0 if drop is False else num_dropped
    assert run.data.splits["train"].report.num_also_held_out == expected


def test_the_source_of_a_labeled_pair_is_both_texts(tmp_path):
    content = recipe_of("classification", tmp_path).model_dump(exclude_unset=True)
    del content["data"]["valid_size"]
    fields = {"text_field": 1, "pair_field": 2, "label_field": 3}
    rows = ["a\tb\tx", "a\tc\ty", "b\ta\tx", "a b\tb\tx"]
    files = {"train": rows, "valid": ["a\t b\ty"]}
    for split, lines in files.items():
        content["data"][split] = {"file": write(tmp_path / f"{split}.tsv", lines), **fields}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    assert run.data.splits["train"].report.num_also_held_out == 1
    assert len(run.data.splits["train"]) == 3


def test_turns_of_one_conversation_are_on_one_side(tmp_path):
    """Each answer is in a row of its own, after the turns before it."""
    content = recipe_of("sft", tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    rows = []
    for n in range(20):
        turns = [
            {"role": role, "content": f"{role[0]} {n} {turn}"}
            for turn in range(3)
            for role in ("user", "assistant")
        ]
        rows += [{"messages": turns[:end]} for end in (2, 4, 6)]
    rows += [{"messages": [{"role": "assistant", "content": f"alone {n}"}]} for n in range(9)]
    path = write(tmp_path / "chats.jsonl", [json.dumps(row) for row in rows])
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    content["objective"]["chat_template"] = write(tmp_path / "chat.jinja", [template])
    content["data"] |= {"train": {"file": path}, "valid_size": 15}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    counts: dict[str, int] = {}
    for row in run.data.texts("valid"):
        first = json.loads(row["messages"])[0]["content"]
        counts[first] = counts.get(first, 0) + 1
    assert sum(counts.values()) == 15
    assert all(count == (3 if "u" in first else 1) for first, count in counts.items())


def test_a_run_whose_training_text_is_all_held_out_is_refused(tmp_path):
    recipe = recipe_of("masked_lm", tmp_path)
    content = recipe.model_dump(exclude_unset=True)
    content["data"]["valid"] = content["data"]["train"]
    content["data"]["drop_held_out"] = True
    with pytest.raises(UserError, match=r"each of the 80 texts of data\.train is also in"):
        PreparedTask(parse_recipe(content), tmp_path / "data")


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_generated_training_data_have_no_held_out_example(task, tmp_path):
    run = PreparedTask(parse_recipe(tiny(task=task)), tmp_path / "data")
    assert run.data.splits["train"].report.num_also_held_out == 0


@pytest.mark.parametrize(
    "task", ["translation", "language_modeling", "masked_lm", "denoising", "classification"]
)
def test_filters_drop_training_rows_alone_before_rows_are_held_out(task, tmp_path):
    """Of rows with and without a mark, those with it are filtered; held-out files keep them."""
    marks = {"min_letters": 1.0, "unique": ["row"]}
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    content["data"]["filters"] = marks
    files = {key: Path(path) for key, path in content["data"]["train"].items()}
    content["data"]["test"] = {}
    for key, path in files.items():
        lines = [*dict.fromkeys(path.read_text().splitlines())]
        if key in ("src", "tgt"):
            lines = path.read_text().splitlines()
        marked = [f"#{line}" for line in lines]
        write(path, [line for pair in zip(lines, marked, strict=True) for line in pair])
        content["data"]["test"][key] = write(tmp_path / f"test-{path.name}", marked)
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    report = run.data.filters
    assert [count.label for count in report.filters] == ["min_letters 1", "unique row"]
    assert report.filters[0].num_dropped == report.filters[0].num_seen // 2
    examples = report.filters[0].examples
    assert len(examples) == 10
    assert all("#" in str(example.texts) and ", line " in example.location for example in examples)
    assert f"filters    {report.num_dropped:,} of " in "\n".join(run.printed_lines)
    assert f"{report.num_dropped:,} dropped by filters" in run.printed_lines[0]
    name = next(iter(run.data.splits["train"].columns))

    def has_marks(split):
        if split != "train":
            return {"#" in str(row) for row in run.data.texts(split)}
        texts = run.data.ids(split, name)
        return {"#" in run.tokenizer.decode(texts[i].tolist()) for i in range(len(texts))}

    assert (has_marks("train"), has_marks("valid"), has_marks("test")) == ({False}, {False}, {True})


def test_filters_are_part_of_the_key_of_prepared_data(tmp_path):
    recipe = recipe_of("masked_lm", tmp_path)
    keys = {"data.filters.min_script": 0.5, "data.filters.src_script": "Latin"}
    identified = {"data.filters.language": True, "data.src_language": "en"}
    changes = [
        *({}, {"data.filters.min_words": 1}, keys, {**keys, "data.src_language": "en"}),
        *(identified, {**identified, "data.filters.language_probability": 0.99}),
    ]
    folders = {
        PreparedTask(recipe.replace(change), tmp_path / "data").data.directory.name
        for change in [*changes, {"data.src_language": "en"}, {"data.src_language": "de"}]
    }
    assert len(folders) == len(changes), "the language matters to min_script and language"


def test_filters_that_do_not_fit_the_data_are_refused(tmp_path):
    recipe = recipe_of("classification", tmp_path)
    for change, message in (
        ({"data.filters.unique": ["tgt"]}, "data.filters.unique: rows have no tgt; use row or"),
        ({"data.filters.min_script": 0.5}, "data.filters.min_script: no language; set data"),
        ({"data.filters.min_words": 99}, "data.filters.min_words: 99 drops all 80 rows that"),
    ):
        with pytest.raises(UserError, match=message):
            PreparedTask(recipe.replace(change), tmp_path / "data")
    with pytest.raises(UserError, match=r"filters\.max_ratio is not read by the task class"):
        recipe.replace({"data.filters.max_ratio": 2.0})


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [(100, 8, 4), (100, 3, 3), (None, 8, 8), (100, None, 4), (10, 8, 1)],
)
def test_windows_of_a_batch_are_within_both_limits(tokens, rows, expected):
    limits = {"training__batch_tokens": tokens, "training__batch_sentences": rows}
    assert rows_per_batch(parse_recipe(tiny(**limits)), 25) == expected
