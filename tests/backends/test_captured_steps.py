"""Recorded decoding steps, replayed, have the results of steps that are not recorded."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import recorded
from architectures import DECODERS, tiny
from backend_models import model_of
from heedful.backends.base import Settings
from heedful.backends.torch import cached_net, captured
from heedful.backends.torch.cached_net import DecodingState
from heedful.backends.torch.captured import FixedStep, recorder_for
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens
from option_space import SEARCH, VOCAB
from waits import Waits

LONGEST = 80
RECORDED = [name for name in DECODERS if name != "mixtral"]  # whose experts read counts


def start(net: Any, texts: int, beams: int) -> Any:
    if isinstance(net, EncoderDecoder):
        source = Tokens.from_ids(torch.randint(VOCAB, (texts, 5)), torch.tensor([5, 2, 4][:texts]))
        return net.start(source, capacity=16, branches=beams)
    return net.start(texts, capacity=16, branches=beams)


def start_twice(
    net: Any, beams: int, *, padded: bool = False
) -> tuple[DecodingState, DecodingState, Tensor]:
    """Two decodings of the same texts, the second recorded; and the tokens of each beam."""
    ids = torch.randint(VOCAB, (3, 4))
    left = torch.tensor([0, 2, 1]) if padded else None
    decodings = []
    for record in (None, recorded.record):
        torch.manual_seed(1)
        cache = start(net, 3, beams)
        decodings.append(
            DecodingState(net, cache, longest=LONGEST, left_padding=left, record=record)
        )  # fmt: skip
        decodings[-1].next_log_probs(ids, decodings[-1])
    return decodings[0], decodings[1], ids.repeat_interleave(beams, 0)


@pytest.mark.parametrize("name", RECORDED)
@torch.no_grad()
def test_replayed_steps_equal_plain_steps_for_every_architecture(name: str) -> None:
    """While beams are reordered, a text leaves, and caches grow and drop tokens."""
    net = tiny(name, max_length=LONGEST)
    plain, replayed, rows = start_twice(net, beams=2, padded=not isinstance(net, EncoderDecoder))
    steps = set()
    for number in range(40):
        rows = torch.cat([rows, torch.randint(VOCAB, (len(rows), 1))], 1)
        expected, actual = (item.next_log_probs(rows, item) for item in (plain, replayed))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        steps.add(replayed._step)
        parents = torch.randint(2, (len(rows) // 2, 2))
        for item in (plain, replayed):
            item.reorder(parents)
            if number == 10:
                item.select(torch.tensor([2, 0]))
        if number == 10:
            rows = rows.view(3, 2, -1)[[2, 0]].flatten(0, 1)
    assert len(steps) <= 6  # of 40: a new one for each capacity and number of texts


@SEARCH
@given(st.sampled_from(["gpt2", "gemma3", "vaswani2017"]), st.integers(1, 3), st.data())
@torch.no_grad()
def test_replayed_steps_equal_plain_steps_after_any_cache_operations(
    name: str, beams: int, data: st.DataObject
) -> None:
    net = tiny(name, max_length=LONGEST)
    plain, replayed, rows = start_twice(net, beams)
    for _ in range(data.draw(st.integers(3, 24), "steps")):
        rows = torch.cat([rows, torch.randint(VOCAB, (len(rows), 1))], 1)
        expected, actual = (item.next_log_probs(rows, item) for item in (plain, replayed))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        texts = len(rows) // beams
        match data.draw(st.sampled_from(["nothing", "reorder", "select"])):
            case "reorder":
                parents = torch.randint(beams, (texts, beams))
                for item in (plain, replayed):
                    item.reorder(parents)
            case "select":
                sentences = torch.randint(texts, (data.draw(st.integers(1, texts)),))
                for item in (plain, replayed):
                    item.select(sentences)
                rows = rows.view(texts, beams, -1)[sentences].flatten(0, 1)


@pytest.mark.parametrize("name", RECORDED)
@torch.no_grad()
def test_a_step_has_constant_shapes_and_never_synchronizes(name: str) -> None:
    """Needed for recording: a step copies no numbers from the host."""
    net = tiny(name)
    cache = start(net, 2, beams=2)
    step = FixedStep(net, cache, recorded.record)
    memory = [tensor.data_ptr() for tensor in cache.tensors()]
    signatures = []
    for position in range(3):
        ids, at = torch.randint(VOCAB, (4, 1)), torch.full((4, 1), position)
        with Waits() as waits, recorded.Recording() as recording:
            step(Tokens(ids, at))
        assert not waits.seen
        signatures.append([*recording.signature()])
    assert signatures[0] == signatures[1] == signatures[2]
    assert not [entry for entry in signatures[0] if "lift_fresh" in str(entry)]
    assert [tensor.data_ptr() for tensor in cache.tensors()] == memory


@pytest.mark.parametrize("name", ["gpt2", "marian", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 3, "num_return": 2},
        {"beam_size": 1, "temperature": 1.0, "num_return": 2, "seed": 3},
    ],
    ids=["greedy", "beams", "samples"],
)
def test_searches_with_replayed_steps_have_equal_outputs(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # which shows its operations whole
    model = model_of(name)
    rows, options = [[5, 6, 7, 8], [9, 4], [6]], {"max_new_tokens": 20} | options
    expected = model.generate(rows, **options, return_details=True)
    counted: list[int] = []
    model.settings = Settings(records_steps=True)
    monkeypatch.setattr(cached_net, "recorder_for", lambda net, device: recorded.record)
    monkeypatch.setattr(recorded.Recording, "replay", _counting(recorded.Recording.replay, counted))
    actual = model.generate(rows, **options, return_details=True)
    assert counted
    for one, other in zip(actual, expected, strict=True):
        assert [o.ids for o in one] == [o.ids for o in other]


def _counting(function: Any, counted: list[int]) -> Any:
    def replay(recording: Any) -> None:
        counted.append(1)
        function(recording)

    return replay


def test_steps_are_recorded_only_on_cuda_without_hooks_or_experts() -> None:
    net = tiny("gpt2")
    assert recorder_for(net, torch.device("cpu")) is None
    assert recorder_for(net, torch.device("cuda")) is captured.record_on_cuda
    with net.head.register_forward_hook(lambda *of: None):
        assert recorder_for(net, torch.device("cuda")) is None
    assert recorder_for(tiny("mixtral"), torch.device("cuda")) is None
