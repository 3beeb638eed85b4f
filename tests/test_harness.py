"""lm-evaluation-harness: results equal those of its adapter for transformers."""

import json
import random
import sys
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import heedful
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.pipelines.metadata import GenerationIds
from heedful.zoo import architecture
from option_space import randomized

pytest.importorskip("lm_eval", reason="lm_eval is not installed")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "12",
    "dogs",
    "run",
    "past",
    "it.",
    "who?",
]
COMMON = {"dataset_path": "json", "test_split": "test"}


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    """Three tasks: choices, perplexity of whole texts, and generation."""
    rows = [
        {
            "q": " ".join(WORDS[i : i + 3 + i % 5]),
            "choices": [f"{WORDS[i % 7]} {WORDS[-1 - i % 5]}", WORDS[i % 11], WORDS[-1]],
            "label": i % 3,
            # Not periodic: the other adapter takes windows of equal tokens for the same request.
            "text": " ".join(random.Random(i).choices(WORDS, k=14 * (1 + i % 4))),
        }
        for i in range(12)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = COMMON | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
    return [
        common
        | {
            "task": "choices",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        common
        | {
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        common
        | {
            "task": "generation",
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{q}}",
            "generation_kwargs": {"until": ["at", "\n"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def model_of(template: Any, max_length: int = 48) -> Any:
    """A tiny GPT-2 of random weights; by default with fewer positions than some texts' tokens."""
    text = " ".join(WORDS)
    tokenizer = train_tokenizer([text], kind="byte_bpe", vocab_size=285, template=template)
    gpt2 = architecture("gpt2")
    config = gpt2.config(
        vocab_size=285, d_model=16, num_heads=2, num_layers=1, max_length=max_length
    )
    torch.manual_seed(0)
    with torch.no_grad():
        net = randomized(gpt2.build(config))
    return heedful.from_net(net, config, tokenizer, generation=GenerationIds(eos_ids=(2,)))


@pytest.mark.parametrize("template", ["none", "bos"])
def test_results_equal_those_of_the_adapter_for_transformers(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from heedful.harness import HeedfulLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = model_of(template)
    heedful.export_hf(model, tmp_path / "hf")
    adapters = [
        HeedfulLM(model, batch_tokens=200),
        HFLM(pretrained=str(tmp_path / "hf"), device="cpu", batch_size=4, dtype="float32"),
    ]
    manager = TaskManager(include_defaults=False)  # which would read thousands of files
    results = []
    for adapter in adapters:
        done = lm_eval.simple_evaluate(
            adapter, tasks=write_tasks(tmp_path), bootstrap_iters=0, task_manager=manager
        )
        results.append(done)
    assert_equal(*results)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Log-probabilities, outputs and metrics of two runs of the harness."""
    for task, samples in ours["samples"].items():
        for one, other in zip(samples, theirs["samples"][task], strict=True):
            if task == "generation":
                assert one["resps"] == other["resps"]
                continue
            for [a], [b] in zip(one["resps"], other["resps"], strict=True):
                log_prob, is_greedy = a if isinstance(a, tuple | list) else (a, None)
                other_log_prob, other_is_greedy = b if isinstance(b, tuple | list) else (b, None)
                assert log_prob == pytest.approx(other_log_prob, abs=1e-3)
                assert is_greedy == other_is_greedy
        for metric, value in ours["results"][task].items():
            other_value = theirs["results"][task][metric]
            close = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, nan_ok=True)
            assert other_value == close, metric


def test_the_adapter_for_servers_has_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local-completions`, which reads the log-probabilities of an echoed prompt."""
    import lm_eval

    pytest.importorskip("tenacity", reason="the packages of lm_eval[api] are not installed")
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    from heedful.harness import HeedfulLM
    from running_server import running

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = model_of("none", max_length=128)  # above that of any text
    heedful.export_hf(model, tmp_path / "hf")  # the harness tokenizes by transformers
    arguments: dict[str, Any] = {
        "bootstrap_iters": 0,
        "task_manager": TaskManager(include_defaults=False),
    }
    with running({"tiny": model}) as server:
        adapter = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="tiny",
            tokenizer=str(tmp_path / "hf"),
            tokenizer_backend="huggingface",
            max_length=127,  # it asks for one token more than it reads
            batch_size=4,
            max_retries=1,
        )
        theirs = lm_eval.simple_evaluate(adapter, tasks=write_tasks(tmp_path), **arguments)
    ours = lm_eval.simple_evaluate(HeedfulLM(model), tasks=write_tasks(tmp_path), **arguments)
    assert_equal(ours, theirs)


def test_requests_decide_between_sampling_and_greedy_decoding(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An imported model whose default is to sample did so for greedy requests too, and limits of
    sampling had no effect."""
    from heedful.harness import HeedfulLM

    model = model_of("none")

    def outputs(**settings: Any) -> list[str]:
        settings = {"until": [], "max_gen_toks": 12, **settings}
        requests = [SimpleNamespace(args=(word, settings)) for word in WORDS]
        return HeedfulLM(model).generate_until(requests)

    greedy = outputs()
    model.metadata = replace(model.metadata, options={"temperature": 4.0})
    assert outputs() == outputs(do_sample=False) == outputs(temperature=0.0) == greedy
    assert outputs(do_sample=True, temperature=4.0, top_k=1) == greedy
    assert outputs(do_sample=True, temperature=4.0, top_k=0) != greedy
    assert "ignored" not in caplog.text
    outputs(num_beams=3)
    assert "ignored in generation_kwargs: num_beams" in caplog.text


def test_other_models_are_refused(tmp_path: Path) -> None:
    from heedful.harness import HeedfulLM

    with pytest.raises(UserError, match="needs a language model"):
        HeedfulLM(heedful.from_net(model_of("none").net, model_of("none").config))


def test_the_device_that_the_harness_gives_is_no_error_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heedful.harness import HeedfulLM

    model_of("none").save(tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda:0", None):
        adapter = HeedfulLM(tmp_path / "model", device=device)  # type: ignore[arg-type]
        assert adapter.model.device.type != "cuda"


def test_the_program_refuses_a_model_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    from heedful import harness

    # Without the tasks of the harness itself: it would read thousands of files.
    own = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", own)
    task = tmp_path / "choices.yaml"
    task.write_text(json.dumps(write_tasks(tmp_path)[0]))  # JSON is YAML
    words = f"harness run --model heedful --model_args path={tmp_path}/none --tasks {task}"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        harness.main()
    assert ended.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"error: {tmp_path}/none does not exist")
    )
