"""Nets are opened and imported without random initialization; memory and size checks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.errors import UserError
from heedful.zoo.architectures import check_memory, host_memory
from heedful.zoo.saved import initialized_net, make_config, uninitialized_net, weights_of
from parity_cases import CASES


def tables(net: Any) -> dict[str, torch.Tensor]:
    """All tensors of a net that are not parameters, buffers or not."""
    return {
        f"{path}.{name}": value
        for path, module in net.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", CASES)
def test_an_uninitialized_net_uses_no_random_numbers_and_has_all_tables(name: str) -> None:
    case = CASES[name]
    config = case.read(**case.hf_config(**case.sizes).to_dict())
    initialized = initialized_net(name, config)
    before = torch.get_rng_state()
    net = uninitialized_net(name, config, weights_of(initialized), "here")
    assert torch.equal(torch.get_rng_state(), before)
    initialized = initialized_net(name, config)
    assert not torch.equal(torch.get_rng_state(), before)
    ours, reference = tables(net), tables(initialized)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[key], reference[key]) for key in ours)
    tied = [list(dict(item.named_parameters())) for item in (net, initialized)]
    assert tied[0] == tied[1]
    assert all(parameter.isfinite().all() for parameter in net.parameters())


STACK = {"vocab_size": 20, "d_model": 8, "num_heads": 2, "num_layers": 2, "d_ff": 16}


@pytest.mark.parametrize(
    "size", [{"num_layers": 1_000}, {"d_ff": 10**9}, {"vocab_size": 10**9}, {"max_length": 10**9}]
)
def test_sizes_that_do_not_fit_the_tensors_are_refused_before_the_build(
    size: dict[str, int],
) -> None:
    weights = weights_of(initialized_net("gpt2", make_config("gpt2", STACK)))
    [(key, value)] = size.items()
    config = make_config("gpt2", STACK | size)
    what = f"{value:,} layers are more" if key == "num_layers" else "a net of .* is more"
    with pytest.raises(UserError, match=f"^here: {what} than its .* its config.json is damaged"):
        uninitialized_net("gpt2", config, weights, "here")
    with pytest.raises(UserError, match="num_layers must be at most"):
        make_config("gpt2", STACK | {"num_layers": 10**7})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_refused(value: float) -> None:
    config = make_config("gpt2", STACK)
    weights = {
        name: tensor.detach()
        for name, tensor in weights_of(initialized_net("gpt2", config)).items()
    }
    weights["embedding.tokens.weight"][3, 4] = value
    with pytest.raises(UserError, match=r"^here: embedding\.tokens\.weight holds NaN or infinity"):
        uninitialized_net("gpt2", config, weights, "here")


@pytest.mark.parametrize("size", [{"d_model": 2**20}, {"vocab_size": 2**31 - 1}])
def test_a_net_larger_than_the_memory_is_refused_before_the_build(size: dict[str, int]) -> None:
    with pytest.raises(UserError, match="GiB to be trained"):
        initialized_net("gpt2", make_config("gpt2", {**STACK, "d_model": 2**12, **size}))


@pytest.mark.parametrize(("device", "place"), [("cpu", "machine"), ("cuda", "GPU")])
def test_the_memory_check_is_for_the_training_device(
    device: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients and two averages; the host of a GPU holds the weights alone."""
    config = make_config("gpt2", STACK)
    weights = sum(tensor.numel() for tensor in weights_of(initialized_net("gpt2", config)).values())
    memory = {"host": 4 * weights if device == "cuda" else 16 * weights, "gpu": 16 * weights}
    monkeypatch.setattr("heedful.zoo.architectures.host_memory", lambda: memory["host"])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (0, memory["gpu"]))
    check_memory("gpt2", config, torch.device(device))
    for kind in ("gpu", "host") if device == "cuda" else ("host",):
        memory[kind] -= 1
        lacking = "machine" if kind == "host" else place
        with pytest.raises(UserError, match=f"GiB to be trained, and this {lacking} has"):
            check_memory("gpt2", config, torch.device(device))
        memory[kind] += 1


def test_the_limit_of_the_control_group_bounds_the_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = host_memory(limit)
    for content, memory in (("max\n", whole), (f"{2 * whole}\n", whole), ("4096\n", 4096)):
        limit.write_text(content)
        assert host_memory(limit) == memory
