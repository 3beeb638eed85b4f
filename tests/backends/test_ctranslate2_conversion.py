"""Nets run in CTranslate2 as they do here, or are refused with every reason."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from architectures import tiny
from backend_cases import CLOSE, outcome, rows_of, vocabulary_of, words_of
from heedful.backends.ctranslate2.conversion import longest_prompt, refusals, write
from heedful.errors import UserError
from heedful.parts.positions import AlibiBias, RelativePositionBias

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_supported_nets_is_up_to_date() -> None:
    """Every architecture, random configurations: equal, or refused; and the table says so."""
    made = runpy.run_path(str(ROOT / "docs" / "make_backends.py"))["render"]()
    page = ROOT / "docs" / "results" / "backends.md"
    assert page.read_text(encoding="utf-8") == made, "run `make docs`"


@pytest.mark.parametrize("name", ["alibi", "buckets"])
@pytest.mark.parametrize("heads", [2, 3])
def test_position_schemes_of_plugins_are_supported(name: str, heads: int) -> None:
    """What decides is the parts of a net, not the name of its architecture."""
    net = tiny("gpt2", num_heads=heads, d_model=4 * heads).float()
    net.embedding.positions = None
    position: nn.Module = AlibiBias(heads)
    if name == "buckets":
        position = RelativePositionBias(heads, 8, 20, causal=True)
        nn.init.normal_(position.weight)
    for block in net.decoder.blocks:
        block.self_attention.sublayer.position = position
    found = outcome(net)
    assert found.difference is not None
    assert found.difference < CLOSE


def test_all_reasons_are_reported_at_once(tmp_path: Path) -> None:
    net = tiny("vaswani2017", norm_placement="output").float()
    blocks = list(net.decoder.blocks)
    blocks[0].feedforward.sublayer.activation = torch.sigmoid
    blocks[0].self_attention.sublayer.softcap = 5.0
    blocks[1].self_attention.sublayer.window = 2
    blocks[1].cross_attention.sublayer.q = nn.Sequential(blocks[1].cross_attention.sublayer.q)
    blocks[1].feedforward.norm.eps = 0.1
    net.head.transform = nn.Tanh()
    with pytest.raises(UserError) as refused:
        write(net, tmp_path, vocabulary_of(net), "float32")
    said = ("output", "sigmoid", "capped at 5.0", "window of 2", "Sequential", "0.1", "Tanh")
    for word in (*said, "layers of the decoder with different feed-forwards"):
        assert word in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_net_of_another_kind_is_refused() -> None:
    assert refusals(nn.Linear(2, 2)) == ["a net of the type Linear"]


def test_a_window_limits_the_prompt_unless_it_covers_all_positions() -> None:
    assert longest_prompt(tiny("mistral", window=3)) == 3
    assert longest_prompt(tiny("mistral", window=48)) is None
    assert longest_prompt(tiny("gpt2")) is None


def test_int8_has_a_quarter_of_the_bytes_and_close_outputs(tmp_path: Path) -> None:
    """Each row of a matrix keeps its own scale, so that small nets lose little."""
    from ctranslate2 import Translator

    net = tiny("vaswani2017", d_model=64, d_ff=128).float()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    sizes, scores = [], []
    for precision in ("float32", "int8"):
        folder = tmp_path / precision
        folder.mkdir()
        write(net, folder, vocabulary_of(net), precision)
        sizes.append((folder / "model.bin").stat().st_size)
        backend = Translator(str(folder), intra_threads=1)
        rows = [words_of(row) for row in rows_of(net, (9, 7))]
        scores.append(torch.tensor(backend.score_batch(rows[:1], rows[1:])[0].log_probs))
        assert backend.compute_type.startswith(precision)
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())
    assert sizes[1] < sizes[0] / 3
    # An eighth of their deviation here; it depends on the processor's instructions.
    assert 0 < float((scores[0] - scores[1]).abs().mean()) < 0.15 * float(scores[0].std())
