"""Supervised fine-tuning: the loss of answers token by token, packed rows, what is learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow import parquet
from torch.nn import functional as F

import heedful
from chat_formats import TASTES, TEMPLATES, chat_of, toy_chats, write_hf_tokenizer
from encoder_runs import PreparedTask, tiny
from heedful.config import parse_recipe
from heedful.data.chat_template import BUILT_IN
from heedful.data.columns import COPY
from heedful.data.plans import plan_packed_rows
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss, target_loss
from heedful.export.peft import export_peft
from heedful.pipelines import LanguageModel
from heedful.recipe_files import with_absolute_paths
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.run_data import Inherited
from heedful.zoo.saved import load_tensors

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 96}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


ROWS = [
    {"messages": chat_of("what is one?", "it is 1", "and two?", "that is 2, more than one")},
    {"prompt": "list a", "response": "a\nb\n\nc"},
    {"messages": chat_of("hi", "ho", system="be brief")},
    {"prompt": "long " * 3, "response": "an answer of several words"},
]


HELD_OUT = {"prompt": "what does ann eat?", "response": "tea"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A tiny LLaMA in the Hugging Face format without a chat template, and its import."""
    folder = tmp_path_factory.mktemp("base")
    hf = write_hf_tokenizer(folder / "hf", "bytes", None)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=330, bos_token_id=1, eos_token_id=2, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(hf)
    heedful.import_hf(hf, folder / "own")
    return hf, folder / "own"


def prepared(
    folder: Path, rows: list[Any], template: str | None = None, **changes: Any
) -> PreparedTask:
    """The task on these rows, with a tokenizer of `chat_formats` and a net of random weights."""
    train = {"data__train__file": write_jsonl(folder / "train.jsonl", rows)}
    train |= {"data__valid__file": write_jsonl(folder / "valid.jsonl", [HELD_OUT])}
    recipe = tiny("sft", **(train | {"data__max_length": 96, "model": {}} | changes))
    path = write_hf_tokenizer(folder / "hf", "bytes", template or "chatml")
    tokenizer = heedful.data.hf_tokenizers.read_tokenizer(path)
    assert tokenizer is not None
    inherited = Inherited((tokenizer, tokenizer))
    return PreparedTask(recipe, folder / "data", "llama", inherited)


def own_losses(task: PreparedTask, folder: Path, rows: list[Any]) -> dict[int, list[float]]:
    """For each chat -log p of the tokens of its answers, one by one, in training order.

    The ids and their mask are those of transformers, by the blocks `generation` of the template;
    each chat is a row of its own.
    """
    hf = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    losses = {}
    for index, row in enumerate(rows):
        chat = row.get("messages") or chat_of(row["prompt"], row["response"])
        encoded = hf.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids = torch.tensor([encoded["input_ids"]])
        with torch.no_grad():
            log_probs = task.model.net(ids)[0, :-1].log_softmax(-1)
        nll = F.nll_loss(log_probs, ids[0, 1:], reduction="none")
        mask = torch.tensor(encoded["assistant_masks"][1:], dtype=torch.bool)
        losses[index] = nll[mask].tolist()
    return losses


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_loss_is_that_of_the_answers_token_by_token(
    tmp_path: Path, template: str, packing: bool
) -> None:
    rows = [row for row in ROWS if "be brief" not in str(row) or template in ("chatml", "llama3")]
    objective = {"packing": packing}
    task = prepared(tmp_path, rows, template, objective=objective, training__batch_sentences=3)
    expected = own_losses(task, tmp_path, rows)
    seen: list[int] = []
    for item in task.plan_epoch(1):
        batch = task.load_batch(item)
        states = task.model.net.decode(batch.tokens)
        states.retain_grad()
        chosen = states.flatten(0, 1).index_select(0, batch.target_positions)
        nll = F.cross_entropy(task.model.net.head(chosen), batch.targets, reduction="none")
        order = [int(chat) for row in item for chat in row]
        seen += order
        torch.testing.assert_close(nll, torch.tensor([x for i in order for x in expected[i]]))
        total = batch_loss(task.model.net, batch)
        assert total.tokens == len(nll)
        torch.testing.assert_close(total.nll, nll.sum().detach())
        # Only the states that predict a token of an answer have a gradient.
        target_loss(task.model.net.head, chosen, batch.targets).loss.backward()
        has_grad = states.grad.flatten(0, 1).any(1)
        assert has_grad.nonzero()[:, 0].tolist() == batch.target_positions.tolist()
        assert (batch.tokens.segments is not None) == (packing and any(len(r) > 1 for r in item))
    assert sorted(seen) == [*range(len(rows))]


def test_prompts_are_context_but_no_targets(tmp_path: Path) -> None:
    """Other tokens in a prompt change the loss; as targets they would be wrong ones."""
    task = prepared(tmp_path, ROWS[1:2])
    batch = task.load_batch(task.plan_epoch(0)[0])
    text = task.tokenizer.decode(batch.targets.tolist(), keep_specials=True)
    assert text == "a\nb\n\nc<|im_end|>"
    last = prepared(tmp_path, ROWS[:1], objective={"answers": "last"})
    batch = last.load_batch(last.plan_epoch(0)[0])
    text = task.tokenizer.decode(batch.targets.tolist(), keep_specials=True)
    assert text == "that is 2, more than one<|im_end|>"


@pytest.mark.parametrize("packing", [True, False])
def test_batches_of_fixed_shapes_have_the_same_loss(tmp_path: Path, packing: bool) -> None:
    task = prepared(tmp_path, ROWS, objective={"packing": packing}, training__compile=True)
    epochs = EpochBatches(task.task, task.data)
    shapes = {shape[:2] for shape in task.task.batch_shapes(task.data)}
    for item in epochs.plan_epoch(1):
        plain, padded = task.load_batch(item), epochs.load_batch(0, item)
        assert tuple(padded.tokens.ids.shape) in shapes
        with torch.no_grad():
            losses = [batch_loss(task.model.net, batch).nll for batch in (plain, padded)]
        torch.testing.assert_close(*losses)


def test_corpora_of_chats_are_mixed_by_weight_and_scored_alone(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [row] * 2) for i, row in enumerate(ROWS[:2])]
    valid = write_jsonl(tmp_path / "valid.jsonl", [HELD_OUT])
    corpora = {"one": {"file": files[0], "weight": 2.0, "valid": {"file": valid}}}
    corpora["two"] = {"file": files[1]}
    recipe = tiny("sft", data__corpora=corpora, model={})
    recipe = recipe.replace({"tokenizer.vocab_size": None, "tokenizer.kind": "byte"})
    recipe = recipe.replace({"data.max_length": 400})
    for packing in (True, False):
        objective = recipe.replace({"objective.packing": packing})
        task = PreparedTask(objective, tmp_path / f"data{packing}", "llama")
        chats = [int(i) for item in task.plan_epoch(0) for row in item for i in row]
        assert sorted(chat % COPY for chat in chats) == [0, 0, 1, 1, 2, 3]
        assert len({*chats}) == 6
        epochs = EpochBatches(task.task, task.data)
        plan = epochs.plan_epoch(0)
        assert packing == any(len(row) > 1 for item in plan for row in item)
        for item in plan:  # the last token of a chat is no input
            batch = epochs.load_batch(0, item)
            assert sum(batch.corpora.values()) == batch.num_tokens + sum(map(len, item))
    assert task.evaluate().corpora.keys() == {"one"}


def test_packed_rows_hold_each_chat_once_and_depend_on_seed_and_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, 50)

    def rows(**changes: int) -> list[list[int]]:
        keys = {"max_length": 32, "batch_size": 3, "seed": 1, "epoch": 1} | changes
        batches = plan_packed_rows(lengths, **keys)
        assert all(len(batch) == 3 for batch in batches[:-1])
        return [row.tolist() for batch in batches for row in batch]

    plan = rows()
    assert sorted(i for row in plan for i in row) == [*range(50)]
    assert all(sum(lengths[row]) <= 32 for row in plan)
    assert plan == rows()
    assert plan != rows(epoch=2)
    assert plan != rows(seed=2)


@pytest.mark.parametrize(
    ("truncation", "counts"),
    [
        ("drop", "3 lines read, 1 chats kept; 2 dropped as too long"),
        ("truncate", "3 lines read, 2 chats kept; 1 dropped as too long; 1 truncated to the"),
        ("error", r"train.jsonl, line 2: \d+ text tokens .* more than max_length 30; raise it, or"),
    ],
)
def test_long_chats_follow_the_truncation_and_are_counted(
    tmp_path: Path, truncation: str, counts: str
) -> None:
    """A chat whose prompt alone is too long has no answer to learn, so that it is dropped."""
    rows = [ROWS[1], {"prompt": "a", "response": "b " * 30}, {"prompt": "a" * 99, "response": "b"}]
    settings = {"data__max_length": 30, "data__truncation": truncation}
    if truncation == "error":
        with pytest.raises(UserError, match=counts):
            prepared(tmp_path, rows, **settings)
        return
    task = prepared(tmp_path, rows, **settings)
    assert any(line.startswith(f"train      {counts}") for line in task.printed_lines)
    lengths = task.data.ids("train").lengths
    assert lengths.max() <= 30
    if truncation == "truncate":
        batch = task.load_batch([np.array([1])])
        assert 30 not in batch.targets.tolist()  # it does not learn to stop where it was cut
        assert batch.num_targets > 5


def test_tables_hold_the_same_chats_as_json_lines(tmp_path: Path) -> None:
    """A table has all fields in each row; those of the other form are missing."""
    expected = prepared(tmp_path, ROWS).data.ids("train")
    names = ("messages", "prompt", "response")
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in ROWS])
    parquet.write_table(table, tmp_path / "t.parquet")
    folder = tmp_path / "folder"  # as datasets writes it
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as to,
    ):
        to.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    for path in (tmp_path / "t.parquet", folder):
        actual = prepared(tmp_path, ROWS, data__train__file=str(path)).data.ids("train")
        assert np.array_equal(actual.ids, expected.ids)
        assert np.array_equal(actual.offsets, expected.offsets)


def test_fields_of_rows_may_have_other_names(tmp_path: Path) -> None:
    expected = prepared(tmp_path, ROWS).data.ids("train")
    names = {"messages": "turns", "prompt": "instruction", "response": "output"}
    rows = [{names[key]: value for key, value in row.items()} for row in ROWS]
    file = {"data__train__file": write_jsonl(tmp_path / "renamed.jsonl", rows)}
    fields = {f"data__train__{key}_field": name for key, name in names.items()}
    actual = prepared(tmp_path, ROWS, **file, **fields).data.ids("train")
    assert [ids.tolist() for ids in actual] == [ids.tolist() for ids in expected]
    for key in names:
        others = {name: value for name, value in fields.items() if f"__{key}_" not in name}
        with pytest.raises(UserError, match=r"renamed\.jsonl, line \d: no key"):
            prepared(tmp_path, ROWS, **file, **others)


LEARNS: dict[str, Any] = {
    "task": "sft",
    "data": {"max_length": 64},
    "objective": {"chat_template": "chatml", "sample_tokens": 12},
    "training": {
        "device": "cpu",
        "precision": "fp32",
        "batch_tokens": None,
        "batch_sentences": 4,
        "max_steps": 120,
        "evaluate_every": 120,
        "average_checkpoints": 1,
        "schedule": {"name": "linear", "learning_rate": 0.01, "warmup_steps": 5},
    },
}
SPLITS = {"train": toy_chats(), "valid": [HELD_OUT]}


@pytest.fixture(scope="module")
def learned(base: tuple[Path, Path], tmp_path_factory: Any) -> Any:
    """The imported base, fine-tuned on the toy chats, and the lines of the run."""
    folder = tmp_path_factory.mktemp("learned")
    recipe = parse_recipe({**LEARNS, "init_from": str(base[1])})
    lines: list[str] = []
    run = heedful.train(recipe, folder / "run", data=SPLITS, print_line=lines.append)
    return run, lines


def assert_knows_the_tastes(model: LanguageModel) -> None:
    questions = [chat_of(f"what does {name} like?") for name in TASTES]
    assert model.chat(questions) == [*TASTES.values()]
    turns = chat_of("what does cy like?", "figs", "and bob?")
    assert model.chat(turns) == "milk"
    assert model.chat(chat_of("tell me about cy")) == "cy likes figs."


def test_an_imported_decoder_learns_the_answers_and_is_exported(
    learned: Any, base: tuple[Path, Path], tmp_path: Path
) -> None:
    """The template and its new tokens come with the model; transformers answers the same."""
    run, lines = learned
    assert_knows_the_tastes(run.model)
    assert "           new special tokens: <|im_start|>, <|im_end|>" in lines
    saved = load_tensors(run.directory / "model.safetensors")["embedding.tokens.weight"]
    assert len(saved) == 332
    assert run.model.ids.eos_ids == (2, 331)
    [line] = (run.directory / "valid.output.jsonl").read_text().splitlines()
    assert json.loads(line)["answer"] == "tea"
    assert json.loads(line)["output"] in TASTES.values()
    scores = json.loads((run.directory / "scores.json").read_text())
    assert scores["num_tokens"] == len(run.model.tokenizer.encode("tea")) + 1
    assert scores["scores"].keys() == {"loss", "perplexity", "token_accuracy"}

    heedful.export_hf(run.model, tmp_path / "hf")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = chat_of("tell me about bob")
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    new = hf.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == "bob likes milk."
    assert new[-1] == 331
    again = heedful.load_language_model(tmp_path / "hf")
    assert again.tokenizer.chat_template == run.model.tokenizer.chat_template
    assert_knows_the_tastes(again)


def test_new_tokens_begin_as_the_mean_of_the_others(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """And the rows of all other tokens are those of the model to start from."""
    training = {**LEARNS["training"], "max_steps": 1, "evaluate_every": 1}
    training["schedule"] = {"name": "constant", "learning_rate": 1e-12, "warmup_steps": 1}
    recipe = parse_recipe({**LEARNS, "training": training, "init_from": str(base[1])})
    run = heedful.train(recipe, tmp_path / "run", data=SPLITS, print_line=lambda line: None)
    tensors = load_tensors(run.directory / "model.safetensors")
    old = load_tensors(base[1] / "model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor[: len(old[name])], old[name])
        if len(tensor) > len(old[name]):
            torch.testing.assert_close(tensor[330:], old[name].mean(0).expand(2, -1))


def test_an_adapter_learns_the_answers_and_trains_the_new_tokens(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    weights = (base[1] / "model.safetensors").read_bytes()
    training = {**LEARNS["training"], "max_steps": 160, "evaluate_every": 160}
    training["schedule"] = {"name": "linear", "learning_rate": 0.02, "warmup_steps": 5}
    adapter = {"rank": 8, "alpha": 16, "targets": ["q", "k", "v", "out", "up", "gate", "down"]}
    recipe = {**LEARNS, "training": training, "adapter": adapter, "init_from": str(base[1])}
    run = heedful.train(
        parse_recipe(recipe), tmp_path / "run", data=SPLITS, print_line=lambda line: None
    )
    assert_knows_the_tastes(run.model)
    assert (base[1] / "model.safetensors").read_bytes() == weights
    names = load_tensors(run.directory / "model.safetensors")
    assert names["embedding.tokens.weight"].shape[0] == 332
    assert not any(name.endswith("q.weight") for name in names)


@pytest.mark.parametrize("tied", [True, False])
def test_peft_opens_an_adapter_with_new_tokens_on_a_resized_base(
    tied: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    hf = write_hf_tokenizer(tmp_path / "hf", "bytes", None)
    torch.manual_seed(0)
    keys = SIZES | {"vocab_size": 330, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**keys, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).save_pretrained(hf)
    heedful.import_hf(hf, tmp_path / "base")
    training = {**LEARNS["training"], "max_steps": 4, "evaluate_every": 4}
    adapter = {"rank": 4, "alpha": 16}
    recipe = {**LEARNS, "training": training, "adapter": adapter}
    run = heedful.train(
        parse_recipe({**recipe, "init_from": str(tmp_path / "base")}),
        tmp_path / "run",
        data=SPLITS,
        print_line=lambda line: None,
    )
    said: list[str] = []
    export_peft(run.directory, tmp_path / "peft", say=said.append)
    assert "resize_token_embeddings(332)" in said[0]
    resized = transformers.LlamaForCausalLM.from_pretrained(hf)
    ids = torch.tensor([[5, 9, 331, 7, 330]])
    with torch.inference_mode():
        before = resized(ids[:, :2]).logits
        resized.resize_token_embeddings(332)
        theirs = peft.PeftModel.from_pretrained(resized, tmp_path / "peft")(ids).logits
        expected = run.model.net(ids)
    assert (theirs[:, :2, :330] - before).abs().max() > 1e-2
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "data, train, row 2: no key 'messages', nor 'prompt' and 'response'"),
        ({"messages": chat_of("a")}, r"data, train, row 2: a chat without an answer"),
        ([{"role": "usr", "content": "a"}], "row 2, message 1: unknown role 'usr'; use system, "),
        ({"messages": chat_of("a", "b", system="c")}, "row 2: the chat template refuses .*alter"),
        ("a text", "row 2: a chat is a mapping, a list of messages, or a pair of texts, not str"),
        ({"messages": [{"role": "user", "content": {1}}]}, "row 2: .* not JSON serializable"),
        (("a", "b", "c"), "row 2, message 1: must have role and content, not be 'a'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATES["mistral"])
    recipe = {**LEARNS, "objective": {"chat_template": str(tmp_path / "t.jinja")}}
    model = {"architecture": "llama", "d_model": 8, "num_heads": 1, "num_layers": 1, "d_ff": 8}
    with pytest.raises(UserError, match=message):
        heedful.train(
            parse_recipe({**recipe, "model": model}),
            tmp_path / "run",
            data={"train": [("a", "b"), row], "valid": [("c", "d")]},
            print_line=lambda line: None,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"chat_template": "chatlm"}}, "no chat template chatlm: give a file with"),
        (
            {"objective": {}},
            "tokenizer to start from has no chat template: set objective.chat_template to cha",
        ),
        ({"objective": {"special_tokens": []}}, "no effect without objective.chat_template"),
        (
            {"objective": {"chat_template": "chatml", "special_tokens": []}},
            r"without a special token \(<.im_start.>, <.im_end.> are none of this tokenizer\)",
        ),
        ({"model": {"architecture": "bert"}}, "bert is not decoder-only, which the task sft req"),
        ({"training__subword_sampling": 0.1}, "answers are marked token by token, so the task"),
        ({"data__max_length": 200}, "data.max_length 200 is more than the 96 tokens that the"),
    ],
)
def test_recipes_that_cannot_work(
    changes: dict[str, Any], message: str, base: tuple[Path, Path], tmp_path: Path
) -> None:
    content = {**LEARNS, "init_from": str(base[1])}
    for name, value in changes.items():
        *section, key = name.split("__")
        if section:
            content[section[0]] = {**content[section[0]], key: value}
        else:
            content[key] = value
    with pytest.raises(UserError, match=message):
        heedful.train(
            parse_recipe(content), tmp_path / "run", data=SPLITS, print_line=lambda line: None
        )
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_template_file_is_part_of_the_prepared_data_and_named_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another content of the file is another tokenizer and other ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text("")
    recipe = parse_recipe({**LEARNS, "objective": {"chat_template": "t.jinja"}})
    train = {"data.train.file": write_jsonl(tmp_path / "a.jsonl", ROWS), "data.valid_size": 1}
    recipe = with_absolute_paths(recipe.replace(train))
    assert recipe.objective == {"chat_template": str(tmp_path / "t.jinja")}
    templates = []
    for source in (BUILT_IN["plain"], BUILT_IN["chatml"]):
        (tmp_path / "t.jinja").write_text(source)
        task = PreparedTask(recipe.replace({"tokenizer.vocab_size": 280}), tmp_path / "data")
        templates.append(task.tokenizer.chat_template)
    assert templates == [BUILT_IN["plain"], BUILT_IN["chatml"]]
    assert with_absolute_paths(parse_recipe(LEARNS)).objective["chat_template"] == "chatml"
