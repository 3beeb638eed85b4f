"""Recorded searches are those of `generate`; embedding maps against numpy."""

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from backend_models import model_of
from heedful import insight
from heedful.insight.embeddings import nearest

PROMPT = "the cat"


@pytest.fixture(scope="module", params=["vaswani2017", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


@pytest.mark.parametrize("rule", ["optimal", "beam_full", "heuristic"])
@pytest.mark.parametrize("limit", [3, 9])
def test_a_tree_has_the_output_of_generate(model: Any, rule: str, limit: int) -> None:
    options = {"beam_size": 3, "stop_rule": rule, "max_new_tokens": limit}
    [expected, *_] = model.generate(PROMPT, return_details=True, **options)
    tree = insight.search_tree(model, PROMPT, **options)
    path = [tree.nodes[index] for index in tree.best]
    assert [node.id for node in path] == expected.ids
    assert path[-1].total == pytest.approx(expected.log_prob, abs=1e-5)
    assert path[-1].score == pytest.approx(expected.score, abs=1e-5)
    assert path[-1].fate == ("finished" if expected.finished else "cut")
    assert tree.text == expected.text
    assert tree.stop.kind in (rule, "length")
    if tree.stop.kind in ("optimal", "heuristic"):
        assert tree.stop.numbers[0] <= tree.stop.numbers[1]
    assert str(tree.stop)
    for node in tree.nodes:
        parent = tree.nodes[node.parent] if node.parent >= 0 else None
        assert node.step == (1 if parent is None else parent.step + 1)
        before = 0.0 if parent is None else parent.total
        assert node.total == pytest.approx(before + node.log_prob, abs=1e-5)
        assert parent is None or parent.fate == "kept"
    for step in range(1, max(node.step for node in tree.nodes) + 1):
        of_step = [node for node in tree.nodes if node.step == step]
        kept = [node.total for node in of_step if node.fate in ("kept", "cut")]
        assert len(kept) <= 3
        eos = model.end_ids()
        pruned = [n.total for n in of_step if n.fate == "pruned" and n.id not in eos]
        assert max(pruned, default=-math.inf) <= min(kept, default=math.inf) + 1e-6


def test_a_sample_is_that_of_generate_with_each_rule(model: Any) -> None:
    rules = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "seed": 3}
    options = {**rules, "repetition_penalty": 1.2, "max_new_tokens": 5}
    trace = insight.sampling_steps(model, PROMPT, **options, top_k_shown=40)
    assert trace.text == model.generate(PROMPT, **options)
    assert trace.seed == 3
    for step in trace.steps:
        names = [distribution.rule.split()[0] for distribution in step.distributions]
        assert names[0] == "model"
        assert names[-4:] == ["repetition_penalty", "temperature", "top_k", "top_p"]
        *_, penalty, heated, top_k, top_p = step.distributions
        np.testing.assert_allclose(sum(step.distributions[0].probabilities), 1, atol=1e-6)
        logs = np.log(penalty.probabilities) / 0.7
        expected = np.exp(logs) / np.exp(logs).sum()
        np.testing.assert_allclose(heated.probabilities, expected, rtol=1e-4)
        assert top_k.num_allowed == 6
        assert 1 <= top_p.num_allowed <= 6
        assert step.id in top_p.ids
        assert step.probability == pytest.approx(top_p.probabilities[top_p.ids.index(step.id)])


def test_greedy_decoding_is_traced(model: Any) -> None:
    trace = insight.sampling_steps(model, PROMPT, max_new_tokens=4)
    [expected] = model.generate(PROMPT, return_details=True, beam_size=1, max_new_tokens=4)
    assert [step.id for step in trace.steps] == expected.ids
    assert all(step.id == step.distributions[-1].ids[0] for step in trace.steps)
    assert trace.stop.kind == ("eos" if expected.finished else "length")
    assert str(trace.stop)
    assert trace.seed is None


def test_embedding_maps(model: Any) -> None:
    """PCA against the eigenvectors of the covariance, neighbors against all cosines."""
    actual = insight.embedding_map(model, "tokens")
    embedding = getattr(model.net, "tgt_embedding", None) or model.net.embedding
    vectors = embedding.tokens.weight.detach().double().numpy()
    centered = vectors - vectors.mean(0)
    values, axes = np.linalg.eigh(centered.T @ centered)
    expected = np.abs(centered @ axes[:, [-1, -2]])
    np.testing.assert_allclose(np.abs(actual.points), expected, atol=1e-6)
    np.testing.assert_allclose(actual.variance, values[[-1, -2]] / values.sum(), atol=1e-6)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T - 9 * np.eye(len(unit))
    np.testing.assert_allclose(actual.similarities[:, 0], cosines.max(1), atol=1e-6)
    assert actual.neighbors[:, 0].tolist() == cosines.argmax(1).tolist()
    assert actual.names == tuple(model.tokenizer.tokens(range(40)))
    texts = ["the cat sat", "a dog ran", "the dog", "cats"]
    sentences = insight.embedding_map(
        model, "sentences", texts=texts, labels=["c", "d", "d", "c"], projection="tsne", seed=4
    )
    assert sentences.settings["seed"] == 4
    assert sentences.variance == ()
    assert (sentences.names, sentences.labels) == (tuple(texts), ("c", "d", "d", "c"))
    unit = np.asarray(model.vectors(texts), np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosines = unit @ unit.T - 9 * np.eye(len(unit))
    np.testing.assert_allclose(sentences.similarities[:, 0], cosines.max(1), atol=1e-6)
    again = insight.embedding_map(model, "sentences", texts=texts, projection="tsne", seed=4)
    np.testing.assert_array_equal(sentences.points, again.points)
    few = insight.embedding_map(model, "positions", limit=5)
    assert (few.names, few.num_left_out) == (("0", "1", "2", "3", "4"), 43)
    assert all(figure.axes for figure in (actual.plot(), sentences.plot()))
    assert insight.search_tree(model, PROMPT, beam_size=2, max_new_tokens=3).plot().axes


def test_neighbors_of_many_vectors_are_those_of_all_cosines() -> None:
    """Which are computed for 1,024 vectors at a time; one is zero."""
    vectors = np.random.default_rng(0).normal(size=(2_100, 3))
    vectors[1_500] = 0
    neighbors, similarities = nearest(vectors)
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = (vectors / norms) @ (vectors / norms).T
    np.fill_diagonal(cosines, -9)
    np.testing.assert_allclose(similarities, -np.sort(-cosines)[:, :8], atol=1e-12)
    found = np.take_along_axis(cosines, neighbors, 1)
    np.testing.assert_allclose(found, similarities, atol=1e-12)
    assert not similarities[1_500].any()


@pytest.mark.slow
def test_umap_is_reproducible_and_separates_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("umap") is None:
        pytest.skip("umap is not installed")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # it compiles for half a minute
    from heedful.insight.embeddings import project

    vectors = np.random.default_rng(0).normal(size=(12, 8))
    vectors[:6] += 6
    points, variance, settings = project(vectors, "umap", 4)
    assert (points.shape, variance, settings["seed"]) == ((12, 2), (), 4)
    np.testing.assert_array_equal(project(vectors, "umap", 4)[0], points)
    centers = points[:6].mean(0), points[6:].mean(0)
    nearest = [np.linalg.norm(points - center, axis=1) for center in centers]
    assert ((nearest[0] < nearest[1]) == (np.arange(12) < 6)).all()
    assert np.isfinite(project(vectors[:3], "umap", 0)[0]).all()
