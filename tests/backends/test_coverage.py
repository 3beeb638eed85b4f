"""The coverage penalty equals an exhaustive search by equation 14 of Wu et al. 2016."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_models import TEXTS, all_scores, model_of, saved
from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines.ensembles import ensemble

LONGEST, PENALTY = 3, 0.7


def scores_of(model: Any, row: list[int], beta: float) -> dict[tuple[int, ...], float]:
    """The score of every output, from the last layer's attention to the source in a pass over whole
    outputs."""
    layer, weights_by_layer = model.net.decoder.blocks[-1].cross_attention.sublayer, {}

    def log_probs_of(source: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with ExitStack() as hooks:
            for name in ("q", "kv"):
                hook = lambda module, inputs, out, name=name: weights_by_layer.update({name: out})  # noqa: E731
                hooks.enter_context(getattr(layer, name).register_forward_hook(hook))
            log_probs = model.net(source, ids).log_softmax(-1)
        heads, width = layer.num_heads, layer.head_dim
        scale = 1 if layer.scale == 1 else width**-0.5  # T5 scales the weights instead
        query, key = weights_by_layer["q"], weights_by_layer["kv"][..., : heads * width]
        parts = zip(query.split(width, -1), key.split(width, -1), strict=True)
        attention = torch.stack([(q @ k.mT * scale).softmax(-1) for q, k in parts]).mean(0)
        return log_probs, beta * attention.sum(1).clamp(max=1).log().sum(-1)

    return all_scores(model, row, LONGEST, PENALTY, log_probs_of)


@pytest.mark.parametrize("name", ["vaswani2017", "t5"])
def test_the_search_finds_the_best_output(name: str) -> None:
    """In batches of different sources; the best output depends on the weight of the penalty."""
    model = model_of(name)
    rows = model.prompt_ids(TEXTS[:2])
    best = []
    for beta in (0.0, 5.0):
        actual = model.generate(
            rows, beam_size=1500, num_return=3, max_new_tokens=LONGEST, length_penalty=PENALTY,
            coverage_penalty=beta, return_details=True)  # fmt: skip
        for row, outputs in zip(rows, actual, strict=True):
            scores = scores_of(model, row, beta)
            expected = sorted(scores, key=lambda ids: -scores[ids])[:3]
            assert [tuple(item.ids) for item in outputs] == expected
            for output in outputs:
                assert output.score == pytest.approx(scores[tuple(output.ids)], abs=1e-5)
        best.append([outputs[0].ids for outputs in actual])
    assert best[0] != best[-1]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stop_rule", ["optimal", "beam_full", "heuristic"])
def test_scores_of_every_search_equal_the_equation(stop_rule: str, groups: int) -> None:
    """For any output, alone or in a batch; a weight of zero changes nothing."""
    model = model_of("marian")
    options: dict[str, Any] = {
        "beam_size": 4, "num_return": 4, "num_groups": groups, "max_new_tokens": LONGEST,
        "length_penalty": PENALTY, "stop_rule": stop_rule,
    }  # fmt: skip
    assert model.generate(
        TEXTS, coverage_penalty=0.0, **options, return_details=True
    ) == model.generate(TEXTS, **options, return_details=True)
    actual = model.generate(TEXTS, coverage_penalty=2.0, **options, return_details=True)
    for text, row, outputs in zip(TEXTS, model.prompt_ids(TEXTS), actual, strict=True):
        [alone] = model.generate([text], coverage_penalty=2.0, **options, return_details=True)
        assert [item.ids for item in alone] == [item.ids for item in outputs]
        scores = scores_of(model, row, 2.0)
        for output in outputs:
            assert output.score == pytest.approx(scores[tuple(output.ids)], abs=1e-5)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_out_of_range_are_refused(weight: float) -> None:
    with pytest.raises(UserError, match="coverage_penalty must be"):
        Options(coverage_penalty=weight)


def test_searches_without_coverage_refuse_it() -> None:
    model = model_of("marian")
    shared = {"coverage_penalty": 0.2, "max_new_tokens": 3}
    for options in ({"beam_size": 1}, {"beam_size": 4, "require": ["cat"]}):
        with pytest.raises(UserError, match="beam_size above 1, without required phrases"):
            model.generate(TEXTS, **options, **shared)
    with pytest.raises(UserError, match="an ensemble takes no coverage_penalty"):
        ensemble([model, model]).generate(TEXTS, beam_size=2, **shared)
    with pytest.raises(UserError, match="needs a source"):
        model_of("gpt2").generate(TEXTS, beam_size=2, **shared)


def test_backends_without_coverage_run_eager(tmp_path, caplog) -> None:
    import heedful

    model = saved("marian", tmp_path / "model")
    opened = heedful.load(tmp_path / "model")
    options = {"beam_size": 4, "max_new_tokens": 5, "coverage_penalty": 0.5}
    assert opened.generate(TEXTS, **options, return_details=True) == model.generate(
        TEXTS, **options, return_details=True
    )
    assert "it has no option coverage_penalty" in caplog.text
    named = heedful.load(tmp_path / "model", backend="ctranslate2")
    with pytest.raises(UserError, match="it has no option coverage_penalty"):
        named.generate(TEXTS, **options)
