"""The commands for language models, encoders, and other formats."""

import gzip
import json
import math
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import heedful
from commands import assert_refused, tree, write_recipe
from heedful import plugins
from heedful.cli.app import COMMANDS, make_app
from heedful.cli.shared import USE
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import architecture
from heedful.zoo.saved import make_config

LINES = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"] * 20
STACK = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "max_length": 24}
TWO = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ff": 32}
PROMPTS = ["the cat", "hello", "a dog runs in"]


def make(directory: Path, name: str, keys: dict[str, Any], task: str, seed: int = 0) -> None:
    """A saved model with large random weights, so that outputs differ clearly."""
    encoder = name == "bert"
    tokenizer = train_tokenizer(
        LINES,
        kind="bpe",
        vocab_size=40,
        extra_specials=["<mask>"],
        template="both" if encoder else "none",
    )
    sizes = (
        ("src_vocab_size", "tgt_vocab_size") if "num_encoder_layers" in keys else ("vocab_size",)
    )
    config: Any = make_config(name, {**keys, **dict.fromkeys(sizes, tokenizer.vocab_size)})
    torch.manual_seed(seed)
    net = architecture(name).build(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    ids = GenerationIds(eos_ids=(2,), suppressed_ids=(0, 1)) if name == "gpt2" else GenerationIds()
    labels = ("no", "yes", "maybe") if keys.get("head") == "classify" else ()
    open_net(net, config, ModelMetadata(name, task, labels=labels, generation=ids), tokenizer).save(
        directory
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    make(root / "lm", "gpt2", STACK, "language_modeling")
    make(root / "draft", "gpt2", STACK, "language_modeling", seed=1)
    make(root / "mlm", "bert", STACK, "masked_lm")
    classes = {"head": "classify", "num_labels": 3}
    make(root / "classes", "bert", STACK | classes, "classification")
    make(root / "two", "marian", TWO | {"max_length": 24}, "translation")
    make(root / "own", "vaswani2017", TWO, "translation")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def opened(models):
    return {name: heedful.load(path, device="cpu") for name, path in models.items()}


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("".join(f"{line}\n" for line in PROMPTS))
    return file


# --- generate -------------------------------------------------------------------------------


def test_generate_streams_what_the_model_generates(commands, models, opened, prompts, tmp_path):
    expected = "".join(f"{t}\n" for t in opened["lm"].generate(PROMPTS, max_new_tokens=9))
    options = ("generate", models["lm"], "--max-new-tokens", 9)
    assert commands.run(*options, *PROMPTS).out == expected
    assert commands.run(*options, "-i", prompts).out == expected
    assert commands.run(*options, stdin=prompts.read_bytes()).out == expected
    ended = commands.run(*options, "-i", prompts, "-o", tmp_path / "out")
    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "out").read_text() == expected


def test_a_seed_gives_the_same_samples_streamed_and_in_batches(commands, models, opened, prompts):
    options = ("--temperature", 1.3, "--top-k", 20, "--top-p", 0.9)
    options += ("--max-new-tokens", 8, "--seed", 3)
    streamed = commands.run("generate", models["lm"], "-i", prompts, *options)
    batched = commands.run("generate", models["lm"], "-i", prompts, *options, "--json")
    texts = [json.loads(line)["outputs"][0]["text"] for line in batched.out.splitlines()]
    assert streamed.out == "".join(f"{text}\n" for text in texts)
    assert texts == opened["lm"].generate(
        PROMPTS, temperature=1.3, top_k=20, top_p=0.9, seed=3, max_new_tokens=8
    )
    other = commands.run("generate", models["lm"], "-i", prompts, *options[:-1], 4)
    assert other.out != streamed.out


def test_samples_without_a_seed_differ(commands, models):
    options = ("generate", models["lm"], "a", "--temperature", 2, "--max-new-tokens", 15)
    assert commands.run(*options).out != commands.run(*options).out


def test_generate_json_of_a_beam(commands, models, opened):
    ended = commands.run(
        *("generate", models["lm"], "the cat", "--num-return", 3, "--length-penalty", 0.5),
        *("--max-new-tokens", 6, "--no-repeat-ngram-size", 2, "--json"),
    )
    actual = json.loads(ended.out)
    expected = opened["lm"].generate(
        ["the cat"],
        beam_size=3,
        num_return=3,
        length_penalty=0.5,
        max_new_tokens=6,
        no_repeat_ngram_size=2,
        return_details=True,
    )[0]
    assert actual["prompt"] == "the cat"
    assert [item["ids"] for item in actual["outputs"]] == [item.ids for item in expected]
    assert [item["score"] for item in actual["outputs"]] == pytest.approx(
        [item.score for item in expected], abs=1e-4
    )


def test_rules_reach_the_model(commands, models, opened):
    plain = opened["lm"].generate(["the cat"], max_new_tokens=12)[0]
    stop = plain.strip()[1:3]
    for arguments, options in (
        (("--stop", stop), {"stop": [stop]}),
        (("--repetition-penalty", 1.8), {"repetition_penalty": 1.8}),
        (("--presence-penalty", 2), {"presence_penalty": 2.0}),
        (("--frequency-penalty", 2), {"frequency_penalty": 2.0}),
    ):
        ended = commands.run(
            "generate", models["lm"], "the cat", "--max-new-tokens", 12, *arguments
        )
        expected = opened["lm"].generate(["the cat"], max_new_tokens=12, **options)[0]
        assert ended.out == f"{expected}\n"
        assert expected != plain, arguments


def test_a_banned_text_is_not_in_the_output(commands, models, opened):
    options = {"temperature": 2.0, "seed": 1, "max_new_tokens": 12}
    plain = opened["lm"].generate(["the cat"], **options)[0]
    # A sampled word of one piece is not sampled if it is banned.
    others = {
        text: opened["lm"].generate(["the cat"], banned=[text], **options)[0]
        for text in ("a", "t", "h", "r", "s", "d", "o", "c", "m", "the")
    }
    text = next(text for text, other in others.items() if other != plain)
    ended = commands.run(
        *("generate", models["lm"], "the cat", "--temperature", 2, "--seed", 1),
        *("--max-new-tokens", 12, "--banned", text),
    )
    assert ended.out == f"{others[text]}\n"


def test_a_banned_word_is_also_banned_after_a_space(tmp_path):
    """Byte-level BPE has another token for it there."""
    tokenizer = train_tokenizer(LINES, kind="byte_bpe", vocab_size=290)
    config: Any = make_config("gpt2", {**STACK, "vocab_size": tokenizer.vocab_size})
    torch.manual_seed(0)
    net = architecture("gpt2").build(config).eval()
    metadata = ModelMetadata("gpt2", "language_modeling", generation=GenerationIds(eos_ids=(2,)))
    model = open_net(net, config, metadata, tokenizer)
    pairs = ((seed, token) for seed in range(50) for token in _sample(model, seed))
    seed, word = next((seed, word) for seed, word in pairs if re.fullmatch(" [a-z]+", word))
    assert word not in _sample(model, seed, banned=[word.strip()])


def _sample(model: Any, seed: int, **options: Any) -> list[str]:
    """The tokens of a sampled text."""
    settings = {"temperature": 3.0, "seed": seed, "max_new_tokens": 20, **options}
    return [model.tokenizer.decode([item]) for item in model.generate([[5]], **settings)[0]]


@pytest.mark.parametrize("draft", ["lookup", "draft"])
def test_a_draft_does_not_change_the_output(commands, models, draft):
    options = ("generate", models["lm"], "the cat", "--max-new-tokens", 12)
    plain = commands.run(*options)
    assert commands.run(*options, "--draft", models.get(draft, draft)).out == plain.out != "\n"


@pytest.mark.parametrize("draft", ["lookup", "draft"])
def test_with_a_draft_the_default_length_is_limited_by_the_net(opened, draft):
    lm = opened["lm"]
    assert lm.config.max_length < 64
    draft_option = opened.get(draft, draft)
    (plain,), (short,) = (
        lm.generate(["the cat"], draft=d, return_details=True)[0] for d in (None, draft_option)
    )
    assert plain.ids[: len(short.ids)] == short.ids
    # The net reads all tokens but the last.
    assert len(short.ids) + len(lm.encode(["the cat"])[0]) == lm.config.max_length + 1
    with pytest.raises(UserError, match="cannot outgrow the net"):
        lm.generate(["the cat"], draft=draft_option, max_new_tokens=64)


@pytest.mark.parametrize("draft", [None, "lookup", "draft"])
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.3, "seed": 3}])
def test_a_stream_is_printed_while_it_is_generated(opened, draft, drawn, monkeypatch):
    """The model runs between the pieces, not before the first of them."""
    lm, calls = opened["lm"], []
    options = {"max_new_tokens": 18, "draft": opened.get(draft, draft), **drawn}
    expected = lm.generate(["the cat"], **options)[0]
    step = type(lm.net).decode

    def counting_stream(net, tokens, cache):
        calls.append(net is lm.net)
        return step(net, tokens, cache)

    monkeypatch.setattr(type(lm.net), "decode", counting_stream)
    pieces = [(piece, sum(calls)) for piece in lm.stream("the cat", **options)]
    assert "".join(piece for piece, _ in pieces) == expected
    assert pieces[0][1] < pieces[-1][1] <= sum(calls)
    assert pieces[0][1] <= sum(calls) / 2


def test_a_whole_file_is_one_prompt(commands, models, opened, tmp_path):
    (tmp_path / "text").write_text("the cat\nsat on")
    ended = commands.run(
        "generate", models["lm"], "--whole-file", "-i", tmp_path / "text", "--max-new-tokens", 5
    )
    assert ended.out == opened["lm"].generate(["the cat\nsat on"], max_new_tokens=5)[0] + "\n"


@pytest.mark.parametrize("options", [{}, {"beam_size": 4, "length_penalty": 0.3}, {"beam_size": 1}])
def test_translate_and_generate_have_equal_outputs(commands, models, opened, options):
    """With an imported Marian 19 of 20 lines once differed."""
    for name in ("two", "own"):
        expected = opened[name].generate([*PROMPTS, ""], **options)
        assert opened[name].translate([*PROMPTS, ""], **options) == expected
    flags = {"beam_size": "--beam-size", "length_penalty": "--length-penalty"}
    arguments = [part for key, value in options.items() for part in (flags[key], value)]
    written = commands.run("generate", models["two"], *PROMPTS, *arguments)
    lines = "".join(f"{prompt}\n" for prompt in PROMPTS).encode()
    translated = commands.run("translate", models["two"], *arguments, stdin=lines)
    assert written.out == translated.out
    assert written.out.splitlines() == opened["two"].generate(PROMPTS, **options)


@pytest.mark.parametrize(
    ("name", "command", "prompts"),
    [
        ("lm", ("generate", "--max-new-tokens", "5"), ["the cat", "hello"]),
        ("own", ("translate",), ["the cat", "", "hello"]),
    ],
)
def test_a_typed_line_is_answered_before_the_next(commands, models, opened, name, command, prompts):
    options = {"max_new_tokens": 5} if name == "lm" else {}
    with commands.conversation(*command, models[name], "--device", "cpu") as (stdin, stdout):
        for prompt in prompts:
            stdin.write(f"{prompt}\n".encode())
            # stdin is still open: without streaming this would wait for ever.
            expected = opened[name].generate([prompt], **options)[0]
            assert stdout.readline().decode() == f"{expected}\n"
        stdin.close()
        assert stdout.read() == b""


# --- fill, classify, embed ------------------------------------------------------------------


def test_fill(commands, models, opened):
    text = "the <mask> sat on [MASK]"
    result = commands.run("fill", models["mlm"], text, "--top-k", 3)
    blocks = [block.splitlines() for block in result.out.split("\n\n")[:-1]]
    expected = opened["mlm"].fill(text, top_k=3)
    assert len(blocks) == len(expected) == 2
    for block, candidates in zip(blocks, expected, strict=True):
        for line, candidate in zip(block, candidates, strict=True):
            probability, token, filled = line.split("\t")
            assert float(probability) == pytest.approx(candidate.probability, abs=1e-5)
            assert (token, filled) == (candidate.token, candidate.text)
    actual = json.loads(commands.run("fill", models["mlm"], "--json", stdin=text.encode()).out)
    assert actual["text"] == text
    assert [len(mask) for mask in actual["masks"]] == [5, 5]
    assert actual["masks"][0][0]["token"] == expected[0][0].token


@pytest.mark.parametrize(
    "line", ["translate two --max-new-tokens 4", "fill mlm", "classify classes", "embed mlm"]
)
def test_texts_with_unknown_characters_are_counted(commands, models, tmp_path, line):
    """A filled text lacked them without a word."""
    command, model, *options = line.split()
    options += ["-o", tmp_path / "out.npy"] if command == "embed" else []
    mask = "<mask>" if command == "fill" else "mat"
    texts = [f"the cat {mask} sat", f"the \u05d0 {mask} \u05d1 sat", f"a {mask} \u05d0"]
    result = commands.run(command, models[model], *options, stdin="\n".join(texts).encode())
    assert "texts with characters that the vocabulary lacks" in result.err
    assert result.err.partition("the vocabulary lacks")[2].startswith(
        ", which the model did not read: 2\n"
    )
    result = commands.run(command, models[model], *options, stdin=texts[0].encode())
    assert "vocabulary" not in result.err


def test_segments_with_unknown_characters_are_counted(commands, models, tmp_path):
    (tmp_path / "page.md").write_text("the cat \u05d0\n\na mat\n\nthe \u05d1 mat\n", "utf-8")
    review = tmp_path / "review.tsv"
    result = commands.run(
        "translate", models["two"], "-i", tmp_path / "page.md", "--review", review
    )
    assert "which the model did not read: 2\n" in result.err
    table = review.read_text("utf-8")
    assert table.count("lacks it: \u05d0") == table.count("lacks it: \u05d1") == 1
    assert table.count("vocabulary") == 2


def test_unknown_characters_are_a_reason_for_a_review(opened):
    model = opened["two"]
    texts = ["the cat sat", "the \u05d0 mat \u05d1 a \u05d0", " "]
    outputs = model.translate(texts, num_return=2, return_details=True)
    first, second, blank = [[output.reasons for output in found] for found in outputs]
    assert first == [(), ()]
    assert second == [("not read, as the model's vocabulary lacks it: \u05d0, \u05d1",)] * 2
    assert not any(blank)
    ids = model.src_tokenizer.encode_target(model.src_tokenizer.encode(texts[1]))
    assert model.translate([ids], return_details=True)[0][0].reasons == ()


def test_classify(commands, models, opened, prompts):
    expected = opened["classes"].classify(PROMPTS)
    plain = commands.run("classify", models["classes"], "-i", prompts)
    assert plain.out.splitlines() == [item.label for item in expected]
    scored = commands.run("classify", models["classes"], "-i", prompts, "--scores")
    for line, item in zip(scored.out.splitlines(), expected, strict=True):
        probability, label = line.split("\t")
        assert label == item.label
        assert float(probability) == pytest.approx(item.probability, abs=1e-5)
    lines = commands.run("classify", models["classes"], "-i", prompts, "--json").out.splitlines()
    actual = [json.loads(line) for line in lines]
    assert [item["label"] for item in actual] == [item.label for item in expected]
    assert actual[0]["scores"] == pytest.approx(expected[0].probabilities, abs=1e-5)


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_classify_of_several_labels_and_of_values(commands, models, prompts, tmp_path, problem):
    shutil.copytree(models["classes"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"problem": problem}))
    expected = heedful.load_classifier(tmp_path / "model", device="cpu").classify(PROMPTS)
    arguments = ("classify", tmp_path / "model", "-i", prompts)
    plain, scored, lines = (
        commands.run(*arguments, *flags).out.splitlines()
        for flags in ((), ("--scores",), ("--json",))
    )
    for text, line, result in zip(plain, lines, expected, strict=True):
        content = json.loads(line)
        assert content["scores"] == pytest.approx(result.scores, abs=1e-5)
        if problem == "multi_label":
            assert text == ",".join(result.labels)
            assert (content["label"], tuple(content["labels"])) == (result.label, result.labels)
        else:
            assert text == "\t".join(f"{value:.6f}" for value in result.values.values())
            assert "label" not in content
    assert scored[0].split("\t")[1::2] == list(
        expected[0].labels if problem == "multi_label" else expected[0].values
    )


def test_classify_pairs(commands, models, opened):
    pairs = "the cat\ta dog\nhello\tworld\n"
    ended = commands.run("classify", models["classes"], "--json", stdin=pairs.encode())
    actual = [json.loads(line)["scores"] for line in ended.out.splitlines()]
    expected = opened["classes"].classify(["the cat", "hello"], pairs=["a dog", "world"])
    for scores, item in zip(actual, expected, strict=True):
        assert scores == pytest.approx(item.probabilities, abs=1e-5)
    alone = opened["classes"].classify(["the cat"])[0].probabilities
    assert actual[0] != pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("header", ["", "text\tlabel\n"])
def test_labels_are_not_classified_as_second_texts(commands, models, header):
    lines = header + "the cat\tyes\na dog\tno\n\nthe dog\tyes\n"
    ended = commands.run("classify", models["classes"], stdin=lines.encode())
    assert (ended.code, ended.out) == (2, "")
    assert "the second column holds labels of the model ('no', 'yes'), not texts" in ended.err
    pair = commands.run("classify", models["classes"], stdin=lines.encode() + b"a dog\ta cat\n")
    assert pair.code == 0


def test_classify_counts_truncated_texts(commands, models):
    ended = commands.run("classify", models["classes"], stdin=b"the cat " * 30)
    assert (ended.code, ended.err) == (0, "truncated texts: 1\n")


@pytest.mark.parametrize("kind", ["lm", "mlm", "two"])
def test_embed(commands, models, opened, prompts, tmp_path, kind):
    expected = opened[kind].vectors(PROMPTS, pooling="last")
    arguments = ("embed", models[kind], "-i", prompts, "--pooling", "last")
    assert commands.run(*arguments, "-o", tmp_path / "v.npy").code == 0
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert commands.run(*arguments, "-o", tmp_path / "v.jsonl").out == ""
    output = commands.run(*arguments).out
    assert (tmp_path / "v.jsonl").read_text() == output
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["text"] for row in rows] == PROMPTS
    np.testing.assert_allclose([row["vector"] for row in rows], expected, atol=1e-5)


# --- score, evaluate, info ------------------------------------------------------------------


def predicted(model, text):
    """The text after its first token, which the model without BOS does not predict."""
    first = model.tokenizer.decode(model.prompt_ids([text])[0][:1])
    return text[len(first) or 1 :]  # "": an unknown character


def test_score_texts(commands, models, opened):
    ended = commands.run("score", models["lm"], stdin="\n".join(["", *PROMPTS, ""]).encode())
    blank, *rows = [[float(value) for value in line.split("\t")] for line in ended.out.splitlines()]
    assert all(math.isnan(value) for value in blank)
    for line, row, actual in zip(PROMPTS, rows, opened["lm"].score(PROMPTS), strict=True):
        nll = -actual.log_prob
        bits = nll / math.log(2) / len(predicted(opened["lm"], line))
        expected = [-nll, math.exp(nll / actual.num_tokens), bits]
        assert row == pytest.approx(expected, rel=1e-4)
    item = commands.run("score", models["lm"], "--per-token", stdin=b"the cat\n").out.split("\t")
    assert float(item[1]) == pytest.approx(math.exp(-float(item[0])), rel=1e-4)


def test_evaluate_running_text(commands, models, opened, tmp_path):
    text = "the cät sat on the mat\na dog runs in the park\n" * 3
    (tmp_path / "text").write_text(text)
    ended = commands.run("evaluate", models["lm"], "-i", tmp_path / "text", "--json")
    actual = json.loads(ended.out)
    score = opened["lm"].score([text])[0]
    bits = -score.log_prob / math.log(2)
    assert actual["num_tokens"] == score.num_tokens
    assert actual["perplexity"] == pytest.approx(2 ** (bits / score.num_tokens), rel=1e-4)
    size = len(predicted(opened["lm"], text))
    assert actual["bits_per_character"] == pytest.approx(bits / size, rel=1e-4)
    assert actual["bits_per_byte"] == pytest.approx(bits / (size + 3), rel=1e-4)
    # The letter ä is not in the vocabulary; without a note, bits look better than they are.
    assert actual["num_unknown"] == 3
    noted = "unknown tokens, which perplexity and bits count like known ones: 3 of "
    assert f"note: {noted}{score.num_tokens}\n" in ended.err


def test_evaluate_notes_characters_that_the_tokenizer_drops(commands, models, opened, tmp_path):
    """They make bits per character look better: the model does not predict them."""
    (tmp_path / "text").write_text("the cat       sat\n" * 5)
    ended = commands.run("evaluate", models["lm"], "-i", tmp_path / "text")
    kept = len(opened["lm"].tokenizer.normalize("the cat       sat\n" * 5))
    assert kept == len("the cat sat " * 5) - 1
    assert f"it reads {kept} of 90, and bits per character" in " ".join(ended.err.split())
    (tmp_path / "text").write_text("the cat sat " * 20)
    assert "it reads" not in commands.run("evaluate", models["lm"], "-i", tmp_path / "text").err


def test_evaluate_and_score_read_as_training_does(commands, models, tmp_path):
    """A byte order mark, Windows line breaks and gzip change nothing, in running text and pairs."""
    text = "the cat sat\na dog runs\n"
    odd = gzip.compress(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (tmp_path / "plain").write_text(text)
    (tmp_path / "odd.gz").write_bytes(odd)
    for command in (("evaluate", "lm", "-i"), ("score", "lm", "-i")):
        plain, other = (
            commands.run(command[0], models[command[1]], command[2], tmp_path / name)
            for name in ("plain", "odd.gz")
        )
        assert (other.code, other.out) == (0, plain.out), other.err
    for command, second in (("evaluate", "--ref"), ("score", "--tgt")):
        plain, other = (
            commands.run(command, models["own"], "--src", tmp_path / name, second, tmp_path / name)
            for name in ("plain", "odd.gz")
        )
        assert (other.code, other.out) == (0, plain.out), other.err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("own", ("--text-field", 0), "--text-field: without effect for translators"),
        ("lm", ("--metrics", "bleu", "--temperature", 0), "--temperature, --metrics: without"),
        ("lm", ("--pair-field", 1, "-o", "out"), "--pair-field, --output: without effect for lang"),
        ("classes", ("--truncate", "--beam-size", 2), "--beam-size, --truncate: without effect"),
    ],
)
def test_evaluate_refuses_options_without_effect(
    commands, models, tmp_path, name: str, arguments: tuple[Any, ...], message: str
) -> None:
    file = tmp_path / "text.tsv"
    file.write_text("the cat\tyes\n")
    data = ("--src", file, "--ref", file) if name == "own" else ("--input", file)
    assert_refused(commands.run("evaluate", models[name], *data, *arguments, cwd=tmp_path), message)
    assert [path.name for path in tmp_path.iterdir()] == ["text.tsv"]


def test_evaluate_keeps_a_first_row_whose_label_the_model_knows(commands, models, tmp_path):
    rows = [f"a dog\t{label}\n" for label in ["yes", "no"] * 6]
    firsts = {"a cat\tmaybe\n": 13, "text\tlabel\n": 12, "Satz\tKlasse\n": 12}
    for name, first in product(("test.tsv", "test.csv"), firsts):
        content = "".join([first, *rows, "\u200b\tyes\n"])
        file = tmp_path / name
        file.write_text(content if name.endswith("tsv") else content.replace("\t", ","))
        ended = commands.run("evaluate", models["classes"], "--input", file, "--json")
        assert json.loads(ended.out)["num_texts"] == firsts[first]
        assert ("has names of columns" in ended.err) == (firsts[first] == 12)
        assert "texts left out as empty: 1\n" in ended.err


def test_evaluate_names_its_own_flags_for_columns_in_another_order(commands, models, tmp_path):
    """It advised --set, which it does not have."""
    (tmp_path / "l.tsv").write_text("label\tsentence\ngood\ta dog\n")
    ended = commands.run("evaluate", models["classes"], "--input", tmp_path / "l.tsv")
    assert_refused(ended, "give columns, such as --text-field 2 --label-field 1")
    assert "--set" not in ended.err


def test_evaluate_labeled_texts(commands, models, opened, tmp_path):
    texts = [*PROMPTS, "the park", "a mat and a dog"]
    predicted = [item.label for item in opened["classes"].classify(texts)]
    answers = [predicted[0], "maybe", predicted[2], "yes", "no"]
    file = tmp_path / "test.tsv"
    rows = zip(texts, answers, strict=True)
    file.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    arguments = ("evaluate", models["classes"], "--input", file)
    actual = json.loads(commands.run(*arguments, "--json", "-o", tmp_path / "out").out)
    right = [a == b for a, b in zip(predicted, answers, strict=True)]
    assert actual["accuracy"] == pytest.approx(sum(right) / 5)
    assert actual["num_texts"] == 5
    table = np.zeros((3, 3), dtype=int)
    for expected, selected in zip(answers, predicted, strict=True):
        table[actual["labels"].index(expected), actual["labels"].index(selected)] += 1
    assert actual["confusion"] == table.tolist()
    assert (tmp_path / "out").read_text().splitlines() == predicted
    assert sum(of["num_texts"] for of in actual["per_label"].values()) == 5
    chances = [item.probability for item in opened["classes"].classify(texts)]
    wrong = sorted((row for row in range(5) if not right[row]), key=lambda row: -chances[row])
    assert [one["text"] for one in actual["examples"]["worst"]] == [texts[row] for row in wrong[:3]]
    assert len(actual["examples"]["random"]) == 3
    output = commands.run(*arguments, "--examples", 1).out
    first = [line.split()[0] for line in output.splitlines() if line]
    labels = actual["labels"]
    values = ["location", "text", "label", "predicted", "probability"]
    assert first == [
        *("accuracy", "macro_f1", "label", *labels, "label", *labels),
        *("worst:", *values, "random:", *values),
    ]
    assert texts[wrong[0]] in output


def test_info_of_every_kind(commands, models, opened):
    for name, path in models.items():
        result = commands.run("info", path)
        assert result.code == 0, result.err
        rows = dict(line.strip().split(maxsplit=1) for line in result.out.splitlines())
        metadata = opened[name].metadata
        assert (rows["kind"], rows["task"]) == (opened[name].kind, metadata.task)
        assert rows["architecture"] == metadata.architecture
        count = sum(parameter.numel() for parameter in opened[name].net.parameters())
        assert (rows["parameters"], rows["d_model"]) == (f"{count:,}", "16")
        joint = " (joint)" if name in ("two", "own") else ""
        assert rows["tokenizer"] == f"bpe of 40{joint}"
        assert ("labels" in rows) == (name == "classes")


# --- import, export, distill ----------------------------------------------------------------


def test_export_and_import(commands, models, opened, tmp_path):
    result = commands.run("export", "hf", models["lm"], tmp_path / "hf")
    assert (result.code, result.err) == (0, "")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "gpt2"
    for line in (["generate", "--max-new-tokens", 7], ["score"]):
        direct, expected = (
            commands.run(line[0], path, *line[1:], *PROMPTS)
            for path in (tmp_path / "hf", models["lm"])
        )
        assert (direct.code, direct.err, direct.out) == (0, "", expected.out)
    assert "gpt2" in commands.run("info", tmp_path / "hf").out
    assert_refused(commands.run("optimize", tmp_path / "hf"), "heedful import hf")
    back = commands.run("import", "hf", tmp_path / "hf", tmp_path / "back", "--set", "dropout=0.25")
    assert (back.code, back.err) == (0, "")
    again = heedful.load(tmp_path / "back", device="cpu")
    assert again.config.dropout == 0.25
    assert again.generate(PROMPTS, max_new_tokens=7) == opened["lm"].generate(
        PROMPTS, max_new_tokens=7
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).unlink()
    bare = commands.run("import", "hf", tmp_path / "hf", tmp_path / "bare")
    assert bare.code == 0
    assert bare.err.startswith("note: ")
    assert "no tokenizer files" in bare.err
    assert_refused(commands.run("generate", tmp_path / "bare", "a"), "no tokenizer")


def test_export_writes_the_requested_precision(commands, models, tmp_path):
    ended = commands.run("export", "hf", models["lm"], tmp_path / "hf", "--precision", "bfloat16")
    assert ended.code == 0, ended.err
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}


def test_distill_is_training_with_a_teacher(commands, tmp_path):
    recipe = write_recipe(tmp_path / "r.json", training__max_steps=2)
    assert commands.train(recipe, tmp_path / "2024").code == 0
    result = commands.run("distill", "2024", recipe, "--out", tmp_path / "small", cwd=tmp_path)
    assert "small learns from 2024: its probabilities of each token" in result.out
    assert result.code == 0, result.err
    assert f"teacher: {tmp_path / '2024'}\n" in (tmp_path / "small" / "recipe.yaml").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "2024-distilled").write_text("in the way")
    named = commands.run("distill", "2024", "2024", cwd=tmp_path)
    assert "runs/2024-distilled learns from 2024" in named.out, "not recipe-distilled"
    assert_refused(named, "runs/2024-distilled")


def test_a_student_inherits_data_and_sizes_of_the_teachers_run(commands, tmp_path):
    pairs = tmp_path / "pairs"
    texts = {"src": ("en", "one two three"), "tgt": ("de", "eins zwei drei")}
    files = [f"data.{part}.{side}={pairs}{more}.{end}" for side, (end, _) in texts.items()
             for part, more in (("train", ""), ("valid", "-valid"))]  # fmt: skip
    for end, words in texts.values():
        Path(f"{pairs}.{end}").write_text(f"{words}\n" * 60)
        Path(f"{pairs}-valid.{end}").write_text(f"{words} {words}\n" * 6)
    small = ["tokenizer.vocab_size=30", "model.size=null", "model.d_model=16", "model.num_heads=2",
             "model.d_ff=8", "model.num_encoder_layers=1", "model.num_decoder_layers=3",
             "training.max_steps=200", "training.evaluate_every=200",
             "training.schedule.learning_rate=0.02",
             "training.schedule.warmup_steps=10"]  # fmt: skip
    sets = [word for setting in [*files, *small] for word in ("--set", setting)]
    assert commands.run("train", "translation", *sets, "--out", tmp_path / "t").code == 0
    result = commands.run(
        "distill", tmp_path / "t", "--student", "--set", "training.max_steps=2",
        "--set", "training.evaluate_every=2", cwd=tmp_path,
    )  # fmt: skip
    assert result.code == 0, result.err
    student = tmp_path / "runs" / "t-student"
    recipe = yaml.safe_load((student / "recipe.yaml").read_text())
    assert recipe["data"]["train"]["src"] == f"{pairs}.en"
    reference, own = (
        json.loads((path / "config.json").read_text())["model"]
        for path in (tmp_path / "t", student)
    )
    assert own == reference | {"num_decoder_layers": 2, "dropout": 0.2}
    both = commands.run("distill", tmp_path / "t", "translation", "--student")
    assert_refused(both, "and not both")
    assert_refused(commands.run("distill", tmp_path / "t"), "give a recipe")
    assert_refused(commands.run("distill", tmp_path / "no", "--student"), "does not exist")


def test_every_task_prints_a_command_for_its_model():

    assert {command for command, _ in USE.values()} <= COMMANDS.keys()
    assert USE.keys() <= set(plugins.task.names())
    # Those that are not named are translated.
    assert set(plugins.task.names()) - USE.keys() - {"dates"} == {"copy", "reverse", "sort"}


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        (("--seed", 1), "--seed has no effect: nothing is sampled"),
        (("--temperature", 0, "--top-k", 2), "--top-k has no effect: nothing is sampled"),
        (("--num-draft-tokens", 2), "--num-draft-tokens has no effect: there is no --draft"),
        (("--stop-rule", "optimal"), "--stop-rule has no effect: there is a single beam"),
        (("--stop-rule", "beam_full", "--beam-size", 3, "--require", "a"), "--stop-rule has no"),
        (("--length-penalty", 0.5), "--length-penalty has no effect on outputs, only on scores"),
        (("--no-shortlist",), "--no-shortlist has no effect: the model has no shortlist"),
        (("--beam-size", 4, "--num-groups", 2), "--num-groups has no effect on outputs but"),
        (("--beam-size", 2, "--stop-rule", "beam_full", "--length-penalty", 0.5), ""),
        (("--top-k", 2, "--seed", 1), ""),
        (("--draft", "lookup", "--num-draft-tokens", 2), ""),
    ],
)
def test_an_option_without_effect_is_noted(commands, models, options, unused):
    done = commands.run("generate", models["lm"], "the", "--max-new-tokens", 2, *options)
    assert done.code == 0, done.err
    assert ("has no effect" in done.err) == bool(unused)
    assert unused in done.err


def test_evaluate_notes_options_without_effect(commands, models, tmp_path):
    (tmp_path / "src").write_text("the cat\n")
    data = ("--src", tmp_path / "src", "--ref", tmp_path / "src", "--max-new-tokens", 2)
    done = commands.run("evaluate", models["own"], *data, "--beam-size", 1, "--seed", 3)
    assert (done.code, done.err.count("has no effect")) == (0, 1), done.err
    assert "note: --seed has no effect: nothing is sampled" in done.err


@pytest.mark.parametrize(
    "command", ["evaluate lm", "score lm", "generate lm", "embed mlm", "classify classes"]
)
def test_a_table_is_no_text(commands, models, tmp_path, command):
    """Scores, vectors and labels were of braces, quotes and keys."""
    name, model = command.split()
    row = '{"text": "the cat"}\n'
    for file, content in {"t.jsonl": row, "t.csv": "the cat,a dog\n", "t.json": row}.items():
        (tmp_path / file).write_text(content)
        ended = commands.run(name, models[model], "--input", tmp_path / file)
        assert_refused(ended, f"{file} is not plain text, by its name", "save its texts as .txt")


@pytest.mark.parametrize(
    ("reference", "language", "is_noted"),
    [
        ("今天天气很好。", (), True),
        ("今天天气很好。", ("--language", "zh"), False),
        ("USB 线 is in", (), False),
    ],
)
def test_evaluate_asks_for_the_language_of_texts_without_spaces(
    commands, models, tmp_path, reference, language, is_noted
):
    """Without it BLEU takes a sentence for a word, and is about 0."""
    (tmp_path / "src").write_text("the cat\n")
    (tmp_path / "ref").write_text(f"{reference}\n")
    data = ("--src", tmp_path / "src", "--ref", tmp_path / "ref", "--max-new-tokens", 2)
    done = commands.run("evaluate", models["own"], *data, *language)
    assert done.code == 0, done.err
    assert ("give --language zh or ja" in done.err) == is_noted
    chrf = commands.run("evaluate", models["own"], *data, "--metrics", "chrf")
    assert "give --language" not in chrf.err


def test_evaluate_counts_texts_that_are_truncated_for_perplexity(commands, models, tmp_path):
    """Only those of the translations were told."""
    (tmp_path / "src").write_text("the cat\na dog\n")
    (tmp_path / "ref").write_text(f"the cat\n{TOO_LONG}\n")
    data = ("--src", tmp_path / "src", "--ref", tmp_path / "ref", "--max-new-tokens", 2)
    done = commands.run("evaluate", models["two"], *data, "--truncate")
    assert done.code == 0, done.err
    assert "note: sources and references truncated for perplexity: 1\n" in done.err


# --- bad input ------------------------------------------------------------------------------

# --- lines that cannot be used, and outputs with line breaks ---------------------------------

TOO_LONG = "the cat sat " * 30
KEPT = ["the cat", "", TOO_LONG, "a dog runs"]
FIGURE = r"-?\d+\.\d+(?:e-?\d+)?"


@pytest.mark.parametrize(
    ("command", "noun"),
    [
        ("generate lm --max-new-tokens 4", "prompts"),
        ("generate two --max-new-tokens 4", "prompts"),
        ("translate two --max-new-tokens 4 --no-split-sentences", "lines"),
        ("score two --src in --tgt ref", "pairs"),
        ("embed mlm", "texts"),
        ("evaluate two --src in --ref ref --json -o out --max-new-tokens 4", "lines"),
    ],
)
def test_a_line_that_is_too_long_does_not_end_a_file(commands, models, tmp_path, command, noun):
    """It has a blank line of its own, is named, and is counted; the others are not changed."""

    def outputs(lines, *more):
        (tmp_path / "in").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "ref").write_text("hello\n" * len(lines))
        name, model, *flags = command.split()
        if "--src" not in flags:
            flags += ["-i", "in"]
        ended = commands.run(name, models[model], *flags, *more, cwd=tmp_path)
        return ended, ((tmp_path / "out").read_text() if "-o" in flags else ended.out).split("\n")

    ended, lines = outputs(KEPT)
    assert ended.code == 0, ended.err
    first, *_ = ended.err.splitlines()
    assert re.match(
        r"(source )?(line|prompt|text) 3 has \d+ tokens, but the model allows 24", first
    )
    assert f"{noun} left out, whose outputs are blank: 1" in ended.err.splitlines()
    _, others = outputs([line for line in KEPT if line != TOO_LONG])
    marked = json.dumps({"text": TOO_LONG, "vector": None}) if noun == "texts" else ""
    assert lines == [*others[:2], marked, *others[2:]]
    if "--json" in command:
        content = json.loads(ended.out)
        assert (content["num_left_out"], content["num_pairs_left_out"]) == (1, 1)
        assert content["num_segments"] == 4
    refused, _ = outputs(KEPT, "--strict")
    assert_refused(refused, " 3 has ", "the model allows 24")
    none, _ = outputs([TOO_LONG, TOO_LONG])
    assert none.code == 2
    assert none.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "line",
    [
        "translate two -i in --max-new-tokens 4 --no-split-sentences",
        "translate two -i in --max-new-tokens 4 --review review",
        "translate two -i in --max-new-tokens 4 --alignments review --no-split-sentences",
        "generate lm -i in --max-new-tokens 4 --json",
        "generate lm -i in --max-new-tokens 4 --temperature 1 --seed 5",
        "score lm -i in",
        "score two --src in --tgt ref",
        "evaluate two --src in --ref ref --json --max-new-tokens 4",
        "embed mlm -i in",
        "classify classes -i in --scores",
        "fill mlm -i masks --top-k 1",
    ],
)
def test_outputs_and_notes_do_not_depend_on_the_lines_read_together(
    models, tmp_path, monkeypatch, capfd, line
):
    """The numbers of lines in notes, too."""
    texts = ["the cat", "", "a dog runs", TOO_LONG, "hello world", "the mat", TOO_LONG, "a park"]
    files = {
        "in": texts,
        "ref": ["hello"] * len(texts),
        "masks": ["the <mask>", "a", "", "a <mask> <mask>", TOO_LONG],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f"{text}\n" for text in lines))
    monkeypatch.chdir(tmp_path)
    command, model, *more = line.split()

    def outputs() -> tuple[list[str], list[float]]:
        """What is printed and written without its figures, and these."""
        make_app()([command, str(models[model]), *more], standalone_mode=False)
        printed, review = capfd.readouterr(), tmp_path / "review"
        assert printed.out
        text = "\0".join((*printed, review.read_text() if review.exists() else ""))
        return re.split(FIGURE, text), [float(figure) for figure in re.findall(FIGURE, text)]

    texts, figures = outputs()
    for size in (1, 3):
        monkeypatch.setattr("heedful.cli.lines.CHUNK", size)
        assert outputs() == (texts, pytest.approx(figures, abs=1e-4, nan_ok=True))


def test_a_prompt_alone_that_is_too_long_is_refused_in_one_line(commands, models, tmp_path):
    out = tmp_path / "out"
    for arguments in ([TOO_LONG, "-o", out], ["-i", out, "--whole-file"]):
        ended = commands.run("generate", models["lm"], *arguments)
        assert_refused(ended, "prompt 1 has ", "the model allows 24")
        out.write_text(TOO_LONG)
    cut = commands.run("generate", models["lm"], TOO_LONG, "--truncate", "--max-new-tokens", 4)
    assert (cut.code, cut.err) == (0, "truncated prompts: 1\n")


def test_a_long_text_is_scored_in_windows_and_named(commands, models):
    ended = commands.run("score", models["lm"], stdin=f"the cat\n{TOO_LONG}\n".encode())
    assert len(ended.out.splitlines()) == 2
    assert ended.err == (
        "note: lines longer than the model's 24 tokens, scored in windows: 1 (the first: line 2)\n"
    )


@pytest.fixture(scope="module")
def breaking(tmp_path_factory):
    """Models whose vocabulary is a line break and two letters."""
    tokenizer = train_tokenizer(["a\nb"], kind="char", keep_whitespace=True)
    root = tmp_path_factory.mktemp("breaking")
    for name, keys in (("gpt2", STACK), ("vaswani2017", TWO)):
        sizes = ("vocab_size",) if name == "gpt2" else ("src_vocab_size", "tgt_vocab_size")
        config = make_config(name, {**keys, **dict.fromkeys(sizes, tokenizer.vocab_size)})
        torch.manual_seed(0)
        net = architecture(name).build(config).eval()
        ids = GenerationIds(
            decoder_start_ids=() if name == "gpt2" else (1,), eos_ids=(2,), suppressed_ids=(0, 1, 3)
        )
        open_net(net, config, ModelMetadata(name, "test", generation=ids), tokenizer).save(
            root / name
        )
    return root


ONLY_BREAKS = ("--banned", "a", "--banned", "b", "--min-new-tokens", 4, "--max-new-tokens", 4)
NOTE = "outputs with line breaks, each written as a space: 2"


@pytest.mark.parametrize("to_file", [True, False])
@pytest.mark.parametrize("command", ["generate", "translate", "evaluate", "bulk"])
def test_an_output_with_line_breaks_is_one_line(commands, breaking, tmp_path, command, to_file):
    lines, out = tmp_path / "lines", tmp_path / "out"
    lines.write_text("a\nb\n")
    model = breaking / ("gpt2" if command == "generate" else "vaswani2017")
    arguments = {
        "evaluate": ["--src", lines, "--ref", lines],
        "bulk": ["--task", "translate", "--input", lines, "--output", out, "--format", "text"],
    }.get(command, ["-i", lines])
    if command == "bulk" and not to_file:
        return
    to_out = ["-o", out] if to_file and command != "bulk" else []
    ended = commands.run(command, model, *arguments, *to_out, *ONLY_BREAKS)
    assert ended.code == 0, ended.err
    if command == "bulk":
        out = out / "part-000000.txt"
    if command == "evaluate" and not to_file:
        assert NOTE not in ended.err
        return
    written = out.read_text() if to_file else ended.out
    assert re.fullmatch("( {3,4}\n){2}", written)
    if command != "bulk":
        assert f"note: {NOTE}" in ended.err.splitlines()


def test_line_breaks_are_kept_in_json_and_for_a_prompt_that_is_given(commands, breaking, tmp_path):
    streamed = commands.run("generate", breaking / "gpt2", "a", *ONLY_BREAKS)
    assert streamed.out.strip("\n") == ""
    assert streamed.out.count("\n") >= 4
    ended = commands.run("generate", breaking / "gpt2", *ONLY_BREAKS, "--json", stdin=b"a\nb\n")
    texts = [json.loads(line)["outputs"][0]["text"] for line in ended.out.splitlines()]
    assert [text.strip("\n") for text in texts] == ["", ""]
    assert all(texts)
    assert NOTE not in streamed.err + ended.err


def test_json_lines_have_no_line_breaks_of_any_kind():
    from heedful.cli.lines import json_line

    text = "a\u2028b\x85c\u2029d\ne"
    assert len(json_line(text=text).splitlines()) == 1
    assert json.loads(json_line(text=text)) == {"text": text}


def test_json_has_null_for_what_is_no_number():
    """NaN and Infinity are no JSON."""
    from heedful.cli.lines import json_line

    content = {"score": math.nan, "outputs": [{"log_prob": -math.inf}, (1.5, math.inf)]}
    expected = {"score": None, "outputs": [{"log_prob": None}, [1.5, None]]}
    assert json.loads(json_line(**content)) == expected


BAD = [
    ("generate mlm a", b"", "generate needs a language model, but this model is a masked"),
    ("generate classes a", b"", "classifier"),
    ("fill lm <mask>", b"", "fill needs a masked language model"),
    ("classify mlm", b"a\n", "classify needs a classifier"),
    ("score mlm", b"a\n", "score needs a language model"),
    ("score two", b"a\n", "give --src FILE and --tgt FILE"),
    ("generate lm", b"", "no prompt: give TEXT"),
    ("generate lm -i missing", b"", "missing"),
    ("generate lm a -i lm", b"", "not both"),
    ("generate lm --whole-file", b"\xff", "not UTF-8"),
    ("generate lm a --whole-file", b"", "--whole-file reads --input or stdin; leave out the"),
    ("average lm made", b"", "lm keeps no checkpoints; name some with --checkpoint"),
    (
        "bulk two --task translate --input two --output made --with mpi",
        b"",
        "local or ray, not mpi",
    ),
    ("verify lm --backend compiled", b"", "no such option: --backend"),
    ("serve =lm --check", b"", "'=lm' gives a model no name; write NAME=DIR"),
    ("generate lm a --top-p 1.5", b"", "--top-p"),
    ("generate lm a --temperature 1 --beam-size 3", b"", "exclude each other"),
    ("generate lm a --draft missing", b"", "does not exist"),
    ("generate lm a --draft mlm", b"", "--draft needs a language model"),
    ("generate missing a", b"", "does not exist"),
    ("fill mlm", b"", "no text: give TEXT"),
    ("fill mlm --strict", b"a <mask>\nno\n", "line 2: the text has no <mask>"),
    ("classify classes --strict", b"a\n\nb\n", "line 2 is empty"),
    ("classify classes --strict", b"a\tb\nc\n", "line 2 has 0 tabs"),
    ("classify classes --strict", b"a\nb\tc\n", "line 2 has 1 tabs"),
    ("embed lm -o vectors.txt", b"a\n", "must end in .npy or .jsonl"),
    ("embed lm --pooling median", b"a\n", "is not one of 'mean', 'first', 'last', 'max'"),
    ("score lm --src lm", b"", "give --src and --tgt"),
    ("score lm a --truncate", b"", "--truncate: without effect for language models"),
    ("score lm a --strict", b"", "--strict: without effect for language models"),
    ("inspect lm --src-lang en", b"", "--src-lang is for a text; give --text too"),
    ("evaluate lm", b"", "give --src and --ref for a translator, --input"),
    ("evaluate lm --input missing.tsv", b"", "--input missing.tsv: No such file"),
    ("evaluate two --input two", b"", "give --src FILE and --ref FILE"),
    ("evaluate mlm --input mlm", b"", "does not support a masked language model"),
    ("import hf lm made", b"", "lm is a model of heedful's already"),
    ("import hf lm made --set head", b"", "write key=value"),
    ("import hf hf made --set width=3", b"", "unknown key width"),
    ("import hf hf made --architecture llama", b"", "llama does not read the model type gpt2"),
    ("export hf lm lm", b"", "exists already"),
    ("export hf lm made --precision int8", b"", "must be float32, bfloat16, float16"),
    ("export ctranslate2 lm made --precision float16", b"", "must be float32, bfloat16, int8"),
]


@pytest.mark.parametrize(("line", "stdin", "message"), BAD)
def test_bad_input_is_one_line(commands, models, tmp_path, line, stdin, message):
    for name in models.keys() & line.split():
        shutil.copytree(models[name], tmp_path / name)
    if " hf hf " in line:
        assert commands.run("export", "hf", models["lm"], tmp_path / "hf").code == 0
    before = tree(tmp_path)
    assert_refused(commands.run(*line.split(), stdin=stdin, cwd=tmp_path), message)
    assert tree(tmp_path) == before
