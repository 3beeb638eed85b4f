"""Ensembles search the mean of their models' probabilities, as an exhaustive search does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from backend_models import TEXTS, all_scores, model_of
from heedful.backends.base import Settings
from heedful.backends.registry import open_conversion
from heedful.deploy.convert import convert_model
from heedful.errors import UserError
from heedful.export.hf import export_hf
from heedful.models.adapters import LoRA
from heedful.pipelines.ensembles import ensemble

CHECK = {"max_new_tokens": 3, "length_penalty": 0.7}


def best_output(models: list[Any], weights: list[float], row: list[int]) -> tuple[Any, float]:
    """The best output of at most three tokens, by enumeration, and its score."""
    shares = torch.tensor(weights)[:, None, None, None] / sum(weights)

    def log_probs_of(source: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
        probs = torch.stack([model.net(source, ids).softmax(-1) for model in models])
        return (probs * shares).sum(0).log(), 0.0

    scores = all_scores(models[0], row, 3, 0.7, log_probs_of)
    return max(scores.items(), key=lambda item: item[1])


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Three architectures with one tokenizer."""
    return [model_of("vaswani2017"), model_of("bart"), model_of("marian", num_encoder_layers=1)]


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_the_search_finds_the_best_by_the_mean_of_probabilities(
    models: list[Any], weights: list[float]
) -> None:
    joint = ensemble(models, weights)
    for row in joint.prompt_ids(TEXTS[:2]):
        ids, score = best_output(models, weights, row)
        [[actual]] = joint.generate(
            [row], beam_size=1500, num_return=1, **CHECK, return_details=True
        )
        assert actual.ids == list(ids)
        assert actual.score == pytest.approx(score, abs=1e-5)
    alone = models[0].generate([row], beam_size=1500, **CHECK, return_details=True)[0][0]
    assert alone.score != pytest.approx(score, abs=1e-3)


def test_an_ensemble_of_one_model_twice_equals_the_model(models: list[Any]) -> None:
    joint = ensemble([models[0], models[0]], [0.2, 0.8])
    for options in ({"beam_size": 3}, {"beam_size": 1}, {"temperature": 1.0, "seed": 3}):
        ours, reference = (
            m.translate(TEXTS, max_new_tokens=9, **options) for m in (joint, models[0])
        )
        assert ours == reference
    [text] = models[0].translate(TEXTS[:1], beam_size=1, max_new_tokens=9)
    assert "".join(joint.stream(TEXTS[0], max_new_tokens=9)) == text


def test_language_models_generate_up_to_the_shortest_length() -> None:
    pair = [model_of("gpt2"), model_of("llama", max_length=20)]
    joint = heedful.ensemble(pair)
    assert joint.config.max_length == 20
    assert pair[0].config.max_length == 48
    alone = [model.generate(TEXTS, max_new_tokens=6) for model in pair]
    assert joint.generate(TEXTS, max_new_tokens=6) not in alone


@pytest.mark.parametrize(
    ("others", "weights", "words"),
    [
        ([("gpt2", {})], None, "another kind"),
        ([("vaswani2017", {"tie_embeddings": "none", "tgt_vocab_size": 41})], None, "41 tokens"),
        ([("vaswani2017", {"tie_embeddings": "none", "src_vocab_size": 39})], None, "39 tokens"),
        ([("bart", {})], [1.0], "1 weights for 2 models"),
        ([("bart", {})], [1e23, 5e-324], "comparable numbers"),
        ([("bart", {})], [1.0, -2.0], "above 0, not -2"),
        ([("bart", {})], [1.0, math.inf], "finite"),
    ],
)
def test_incompatible_models_are_refused(
    others: list[Any], weights: Any, words: str, models: list[Any]
) -> None:
    with pytest.raises(UserError, match=words):
        ensemble([models[0], *(model_of(name, **keys) for name, keys in others)], weights)


def test_other_tokenizers_of_the_same_size_are_refused(models: list[Any]) -> None:
    from heedful.data.tokenizer import train_tokenizer

    other = model_of("vaswani2017")
    lines = [text[::-1] for text in TEXTS]
    other._src_tokenizer = train_tokenizer(lines, kind="bpe", vocab_size=40)
    with pytest.raises(UserError, match="another tokenizer"):
        ensemble([models[0], other])
    with pytest.raises(UserError, match="at least one model"):
        ensemble([])


def mean_log_probs(models: list[Any], weights: list[float], *ids: torch.Tensor) -> torch.Tensor:
    """(T, V) of one text, by whole passes of each net."""
    with torch.no_grad():
        probs = [model.net(*ids)[0].double().softmax(-1) for model in models]
    return sum(p * w for p, w in zip(probs, weights, strict=True)).div(sum(weights)).log()


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_targets_are_scored_by_the_mean_of_probabilities(
    models: list[Any], weights: list[float]
) -> None:
    """By `score`, `teacher_forced` and the backend, with the scores of the search."""
    joint = ensemble(models, weights)
    sources, targets = TEXTS, TEXTS[::-1]
    log_probs, right, rows = [], 0, []
    for source, target in zip(sources, targets, strict=True):
        tokenizer = joint.tokenizer
        row, ids = (tokenizer.encode_target(tokenizer.encode(text)) for text in (source, target))
        read = torch.tensor([[*joint.ids.decoder_start_ids, *ids[:-1]]])
        actual = mean_log_probs(models, weights, torch.tensor([row]), read)
        log_probs.append(actual[range(len(ids)), ids].tolist())
        right += int((actual.argmax(-1) == torch.tensor(ids)).sum())
        rows.append((row, ids[:-1]))
    expected, count = [sum(parts) for parts in log_probs], sum(map(len, log_probs))
    assert [item.log_prob for item in joint.score(sources, targets)] == pytest.approx(expected)
    alone = models[0].score(sources, targets)
    assert [item.log_prob for item in alone] != pytest.approx(expected, abs=1e-2)
    actual = joint.teacher_forced(sources, targets)
    assert actual["perplexity"] == pytest.approx(math.exp(-sum(expected) / count))
    assert actual["token_accuracy"] == pytest.approx(right / count)
    backend_log_probs = joint.backend.log_probs(
        *map(list, zip(*rows, strict=True)), joint.request([rows[0][0]])
    )
    assert [item.tolist() for item in backend_log_probs] == [
        pytest.approx(parts, rel=1e-5)
        for parts in log_probs  # of single precision
    ]


def test_texts_are_scored_by_the_mean_of_probabilities() -> None:
    """Also texts that are longer than the shortest of the nets."""
    pair, weights = [model_of("gpt2"), model_of("llama", max_length=20)], [2.0, 1.0]
    joint = ensemble(pair, weights)
    rows = joint.prompt_ids(TEXTS)
    expected = []
    for row in rows:
        actual = mean_log_probs(pair, weights, torch.tensor([row[:-1]]))
        expected.append(float(actual[range(len(row) - 1), row[1:]].sum()))
    assert max(map(len, rows)) <= 20
    assert [item.log_prob for item in joint.score(TEXTS)] == pytest.approx(expected)
    assert all(item.log_prob > -math.inf for item in joint.score([" ".join(TEXTS)]))


def test_every_net_is_evaluated_without_dropout(models: list[Any]) -> None:
    joint = ensemble(models)
    expected = joint.score(TEXTS, TEXTS), joint.translate(TEXTS, max_new_tokens=9)
    for model in models:
        model.net.train()
    assert (joint.score(TEXTS, TEXTS), joint.translate(TEXTS, max_new_tokens=9)) == expected
    assert not any(model.net.training for model in models)


def test_an_ensemble_counts_its_own_outputs(models: list[Any]) -> None:
    """It began with the counts of its first model, to which it added failures of its own."""
    first = models[0]
    before = dict(first.failures), first.num_truncated
    try:
        first.report_failure("dead_end", 1)
        first.num_truncated += 1
        joint = ensemble(models[:2])
        assert (joint.failures, joint.num_truncated, joint.num_left_out) == ({}, 0, 0)
        joint.report_failure("dead_end", 1)
        assert joint.failures["dead_end"] == first.failures["dead_end"] == 1
    finally:
        first.failures, first.num_truncated = before


COMBINED = {  # what an ensemble does with all of its models
    "request", "request_of_batch", "request_with", "backend_for", "backend_for_row", "chat",
    "generate", "generations", "score", "note_once", "report_failure", "iterate_generations",
    "stream", "stream_chat", "stream_with", "teacher_forced", "translate",
}  # fmt: skip
SHARED = {  # equal in all models of an ensemble, or taken from the first
    "batches", "chat_encoder", "chat_rows", "check_ids", "check_lengths", "completed", "encode",
    "end_ids", "has_tokenizer", "ids", "kind", "leave_out", "length_limit", "options", "pair_ids",
    "prompt_ids", "rows_of", "src_tokenizer", "tgt_tokenizer", "tokenizer", "default_options",
    "kept", "first_id", "sources", "target_ids",
    "token_alignments",  # no alignment for all outputs
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "add_adapter": lambda joint, path: joint.add_adapter(LoRA(2, 2.0, 0.0, (), ())),
    "merge_adapter": lambda joint, path: joint.merge_adapter(),
    "device": lambda joint, path: joint.device,
    "eager": lambda joint, path: joint.eager,
    "embed": lambda joint, path: joint.embed(TEXTS),
    "net": lambda joint, path: joint.net,
    "backend_with": lambda joint, path: joint.backend_with("states"),
    "file_writer": lambda joint, folder: joint.file_writer(folder / "out"),
    "save": lambda joint, path: joint.save(path / "model"),
    "vectors": lambda joint, path: joint.vectors(TEXTS),
    "with_prompt": lambda joint, path: joint.embed(TEXTS, prompt="a"),
    "a draft": lambda joint, path: joint.generate(TEXTS, beam_size=1, draft=joint),
    "a draft of another": lambda joint, path: model_of(joint.metadata.architecture).generate(
        TEXTS, beam_size=1, draft=joint
    ),
    "another ensemble": lambda joint, path: ensemble([joint, joint]),
    "a form": lambda joint, path: convert_model(joint, path, "float32"),
    "an export": lambda joint, path: export_hf(joint, path / "hf"),
}


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2"])
def test_no_method_uses_the_first_model_only(name: str, tmp_path: Path) -> None:
    """Each public method combines the models, is equal for all of them, or is refused by name."""
    joint = ensemble([model_of(name), model_of(name)])
    offered = {name for name in object.__dir__(joint) if not name.startswith("_")}
    offered -= {*vars(joint)}
    assert offered <= COMBINED | SHARED | {*REFUSED}, "decide what an ensemble does with it"
    for what, use in REFUSED.items():
        with pytest.raises(UserError, match=r"an ensemble (has no net|takes no draft)"):
            use(joint, tmp_path)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], what


def test_a_draft_is_refused(models: list[Any]) -> None:
    with pytest.raises(UserError, match="no draft"):
        ensemble(models[:2]).translate(TEXTS, beam_size=1, draft="lookup")


def test_the_command_takes_several_models(commands: Any, tmp_path: Path, models: list[Any]) -> None:
    for name, model in zip("ab", models, strict=False):
        model.save(tmp_path / name)
    lines = "\n".join(TEXTS).encode()
    options = ("--beam-size", 2, "--max-new-tokens", 9)
    places = (tmp_path / "a", tmp_path / "b")
    arguments = (places[0], "--ensemble", places[1])
    done = commands.run(
        "translate", *arguments, *options, "--weight", 1, "--weight", 3, stdin=lines
    )
    assert done.code == 0, done.err
    expected = ensemble(models[:2], [1.0, 3.0]).translate(TEXTS, beam_size=2, max_new_tokens=9)
    assert done.out.splitlines() == expected
    one = commands.run("translate", places[0], "--weight", 1, "--weight", 3, stdin=lines)
    assert one.code == 2
    assert "--weight is the weight of a model of an --ensemble" in one.err


@pytest.mark.parametrize("backend", [False, True])
def test_no_unknown_excludes_the_unknown_token(backend: bool, tmp_path: Path) -> None:
    """Equal to banning it, also in the backend; this model prefers that token."""
    model = model_of("vaswani2017", tie_embeddings="none")
    unknown = model.tgt_tokenizer.unk_id
    with torch.no_grad():
        model.net.head.out.weight[unknown] *= 8
    if backend:
        facts = convert_model(model, tmp_path, "float32")
        model.backend = open_conversion(
            tmp_path, tmp_path, "ctranslate2", "float32", facts, Settings(1)
        )
    rows, options = model.prompt_ids(TEXTS), {"beam_size": 1, "max_new_tokens": 9}
    assert any(unknown in ids for ids in model.generate(rows, **options))
    actual = model.generate(rows, no_unknown=True, **options)
    assert actual == model.generate(rows, banned=[unknown], **options)
    assert not any(unknown in ids for ids in actual)
