"""The table of tensor names: cases that the parity tests of the zoo do not cover."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.zoo.names import Name, Names, from_hf, layer_names, to_hf
from heedful.zoo.saved import weights_of

VOCAB, WIDTH, HEAD_WIDTH, HIDDEN = 7, 6, 2, 5


class GroupedAttention(nn.Module):
    """Query, key and value in one matrix, of different heights."""

    def __init__(self, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self.split_sizes = (
            num_heads * HEAD_WIDTH,
            num_groups * HEAD_WIDTH,
            num_groups * HEAD_WIDTH,
        )
        self.qkv = nn.Linear(WIDTH, sum(self.split_sizes))
        self.out = nn.Linear(num_heads * HEAD_WIDTH, WIDTH, bias=False)


class Layer(nn.Module):
    def __init__(self, num_heads: int, num_groups: int) -> None:
        super().__init__()
        self.attention = GroupedAttention(num_heads, num_groups)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)  # in two equal parts
        self.norm = nn.LayerNorm(WIDTH)


class Net(nn.Module):
    def __init__(self, layers: int = 2, heads: int = 2, groups: int = 1, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(heads, groups) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter)


LAYER = {"attention.qkv": "{q,k,v}", "attention.out": "o", "up.weight": "{gate,up}", "norm": "ln"}
NAMES = Names(
    [
        Name("embedding", "base.wte"),
        *layer_names("layers.{i}", "base.h.{i}", LAYER, transposed=True),
        Name("head.bias", "final_logits_bias", row=True),
        Name("head.weight", "lm_head.weight"),
    ],
    prefix="base.",
    buffers=r"base\.h\.\d+\.mask|.*position_ids",
    unused=r"pooler\..*",
)


def file_of(**sizes: Any) -> dict[str, Tensor]:
    """The tensors of a file of a new net."""
    return to_hf(Net(**sizes), NAMES)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refuses(
    file: Mapping[str, Tensor | None], message: str, names: Names = NAMES, **sizes: Any
) -> None:
    """A file (None: a missing one) is refused with the message, and the net is unchanged."""
    net = Net(**sizes)
    held = {name: tensor for name, tensor in file.items() if tensor is not None}
    before = {name: weight.detach().clone() for name, weight in weights_of(net).items()}
    with pytest.raises(UserError, match=message) as error:
        from_hf(net, held, names, "there/model.safetensors")
    assert "there/model.safetensors" in str(error.value)
    assert "\n" not in str(error.value)
    assert same(weights_of(net), before)


# --- formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_converted_without_loss(dtype: torch.dtype) -> None:
    net = Net()
    file = {name: tensor.to(dtype) for name, tensor in to_hf(net, NAMES).items()}
    assert from_hf(net, file, NAMES, "file") == []
    assert all(weight.dtype == torch.float32 for weight in net.parameters())
    assert same(to_hf(net, NAMES), {name: tensor.float() for name, tensor in file.items()})


def test_weights_beyond_the_dtype_are_rounded_with_a_notice() -> None:
    net = Net(layers=0)
    file = {name: tensor.double() / 3 for name, tensor in to_hf(net, NAMES).items()}
    notices = from_hf(net, file, NAMES, "file")
    assert notices == ["file: rounded from float64 to float32: base.wte.weight, final_logits_bias"]
    assert torch.equal(net.embedding.weight, file["base.wte.weight"].float())


# --- what does not fit ----------------------------------------------------------------------


Q = "base.h.1.q"
STRANGE = "base.h.0.ln.wieght"
WRONG: dict[str, dict[str, Tensor | None]] = {
    rf"lacks the tensor {Q}.bias \(and 1 more\)$": {f"{Q}.weight": None, f"{Q}.bias": None},
    f"not in the model: {STRANGE}; the nearest known name is base.h.0.ln.weight$": {
        "base.h.0.ln.weight": None,
        STRANGE: torch.ones(WIDTH),
    },
    # Weights that were quantized.
    **{
        f"base.h.0.o.weight is {str(dtype)[6:]}, .* quantized": {
            "base.h.0.o.weight": torch.ones(4, 6).to(dtype)
        }
        for dtype in (torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)
    },
    "base.h.0.o.qweight is int32, .* quantized": {
        "base.h.0.o.qweight": torch.zeros(1, dtype=torch.int32)
    },
    "holds base.h.0.gate both with and without base": {"h.0.gate": torch.ones(6, 5)},
    # A pattern of buffers matches whole names only; older endings count where a map has them.
    "not in the model: base.h.0.mask_of_weight": {"base.h.0.mask_of_weight": torch.ones(2)},
    "not in the model: base.h.0.ln.gamma": {"base.h.0.ln.gamma": torch.ones(WIDTH)},
    r"lm_head.weight is \(6, 6\), but the model's head.weight needs": {
        "lm_head.weight": torch.ones(WIDTH, WIDTH)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_mismatched_tensors_are_named(message: str) -> None:
    refuses({**file_of(), **WRONG[message]}, message)


def test_each_part_of_a_joined_matrix_must_fit() -> None:
    """Parts whose heights only add up to the right sum would be split at the wrong rows."""
    file = file_of(heads=4, groups=2)
    query, key = file["base.h.1.q.weight"], file["base.h.1.k.weight"]
    message = r"base.h.1.q.weight is \(6, 4\), but .*layers.1.attention.qkv.weight needs \(6, 8\)"
    swapped = {**file, "base.h.1.q.weight": key, "base.h.1.k.weight": query}
    refuses(swapped, message, heads=4, groups=2)


# --- what may be there, or lack -------------------------------------------------------------


def test_unused_weights_are_ignored_with_a_notice() -> None:
    file = {**file_of(), **{f"pooler.{i}": torch.ones(1) for i in range(5)}}
    assert from_hf(Net(), file, NAMES, "file") == [
        "file: ignored tensors that are not in the model: pooler.0, pooler.1, pooler.2 and 2 more"
    ]


def test_an_optional_weight_is_left_as_initialized_with_a_notice() -> None:
    names = replace(NAMES, optional=r"head\.bias|layers\.\d+\.attention\.qkv\.bias")
    source, net = Net(), Net()
    file = to_hf(source, NAMES)
    bias = net.head.bias.detach().clone()
    del file["final_logits_bias"]
    assert from_hf(net, file, names, "file") == ["file lacks head.bias: left as initialized"]
    assert torch.equal(net.head.bias, bias)
    assert torch.equal(net.embedding.weight, source.embedding.weight)
    new_net = Net()
    from_hf(net, file, names, "file", lambda: new_net)
    assert torch.equal(net.head.bias, new_net.head.bias)
    del file["base.h.0.k.bias"]  # half of an optional tensor is no tensor
    refuses(file, "lacks the tensor base.h.0.k.bias$", names)


# --- zero biases in files --------------------------------------------------------------------

ZEROS = replace(
    NAMES,
    names=[
        replace(name, zero_bias=name.path == "layers.{i}.attention.out") for name in NAMES.names
    ],
)


@pytest.mark.parametrize("value", [1e-30, -1.0, float("nan")])
def test_biases_that_should_be_zero_are_checked(value: float) -> None:
    name, file = "base.h.1.o.bias", to_hf(Net(), ZEROS)
    other = torch.tensor([0.0, 0, value, 0, 0, 0])
    refuses({**file, name: other}, f"{name} should be zeros .* does not have it", ZEROS)
    longer = torch.zeros(WIDTH + 1)
    refuses({**file, name: longer}, rf"{name} should be zeros \(6,\)", ZEROS)


# --- mistakes in a map ----------------------------------------------------------------------


MISTAKES: dict[str, dict[str, Name | None]] = {
    "no name for .*layers.0.norm.weight": {"layers.{i}.norm": None},
    "the name of two parameters": {"head.bias": Name("head.bias", "base.wte.weight")},
    "head.bias has 7 rows": {"head.bias": Name("head.bias", "{a,b}")},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_wrong_table_of_names_fails_an_assertion(message: str) -> None:
    net, changes = Net(), MISTAKES[message]
    names = [changes.get(name.path, name) for name in NAMES.names]
    present = [name for name in names if name is not None]
    with pytest.raises(AssertionError, match=message):
        from_hf(net, to_hf(net, NAMES), replace(NAMES, names=present), "file")
