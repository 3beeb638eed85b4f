"""Parity tests of all encoder-only models."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.errors import UserError
from hf_parity import (
    CLOSE,
    Case,
    ParityTests,
    Variant,
    assert_initialized,
    assert_same_net,
    assert_same_outputs,
    exported,
    imported,
    output,
    random_rows,
    reread,
)

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 13,
    "max_position_embeddings": 16,
}


@dataclass(frozen=True, kw_only=True)
class EncoderCase(Case):
    """An encoder-only architecture to test; `hf_class` has the head mlm.

    Args:
        classify_class, base_class: classes of transformers with the head classify, and without.
        mlm_tensors, classify_tensors: prefixes of the names of a head's tensors in files.
        norm_eps: of all norms, as published.
        head_dropouts: before the matrices of a classifier, if that of the layers is 0.3.
        std: standard deviation of all new matrices.
        shrinks: new weights that end a residual branch are smaller.
        new_in_classifier: tensors that a masked language model opened as a classifier lacks.
        counts_by_pad: transformers counts positions by the id of padding, which no text may have.
    """

    classify_class: Any
    base_class: Any
    mlm_tensors: str
    classify_tensors: str
    norm_eps: float
    head_dropouts: tuple[float, float]
    std: float = 0.02
    shrinks: bool = False
    new_in_classifier: str = "head.dense.bias, head.dense.weight, head.labels.bias and 1 more"
    counts_by_pad: bool = False

    @property
    def heads(self) -> dict[str, Any]:
        return {"mlm": self.hf_class, "classify": self.classify_class, "none": self.base_class}

    def variants(self) -> dict[str, Variant]:
        return {
            f"{head}-{number}": Variant(hf_class, keys, number)
            for head, hf_class in self.heads.items()
            for number, keys in enumerate(self.configs)
        }

    def rows(self, model: Any, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
        if not self.counts_by_pad:
            return super().rows(model, lengths, seed)
        rows = random_rows(model.config.vocab_size - 1, lengths, seed)
        return [row + (row >= model.config.pad_token_id) for row in rows]


class Poolerless:
    """A base class of transformers without its pooler."""

    def __init__(self, base_class: Any) -> None:
        self.base_class = base_class

    def __call__(self, config: Any) -> Any:
        return self.base_class(config, add_pooling_layer=False)

    def from_pretrained(self, directory: Path, **keys: Any) -> Any:
        return self.base_class.from_pretrained(directory, add_pooling_layer=False, **keys)


class EncoderParityTests(ParityTests):
    case: EncoderCase

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "head" in metafunc.fixturenames:
            metafunc.parametrize("head", ["mlm", "classify"])

    def assert_same(self, model: Any, net: Any, seed: int = 0) -> None:
        super().assert_same(model, net, seed)
        lengths = self.case.lengths
        rows = self.case.rows(model, lengths, seed)
        if getattr(model.config, "type_vocab_size", 1) > 1:
            several = random_rows(model.config.type_vocab_size, lengths, seed)
            types = [row.sort().values for row in several]  # one text after the other
            assert_same_outputs(model, net, rows, types=types)

    def test_a_masked_lm_opened_as_a_classifier(self, tmp_path: Path) -> None:
        model = self.case.model()
        actual = imported(model, tmp_path, head="classify", num_labels=3)
        assert_same_encoder(actual.net, imported(model, tmp_path).net)
        out, left = actual.notices
        assert f"not in the model: {self.case.mlm_tensors}" in out
        lacks = self.case.new_in_classifier
        assert left.endswith(f"lacks {lacks}: left as initialized")
        assert actual.net.head.labels.weight.shape == (3, 8)
        assert 0 < actual.net.head.labels.weight.abs().max() < 0.1
        assert not actual.net.head.labels.bias.any()
        back = exported(actual, tmp_path / "exported", self.case.classify_class)
        assert back.config.num_labels == 3
        self.assert_same(back, actual.net)

    def test_any_file_without_a_head_gives_states(self, head: str, tmp_path: Path) -> None:
        model = self.case.model(self.case.heads[head])
        actual = imported(model, tmp_path, head="none")
        assert actual.net.head is None
        (notice,) = actual.notices
        tensors = self.case.mlm_tensors if head == "mlm" else self.case.classify_tensors
        assert tensors in notice
        self.assert_same(model.base_model, actual.net)

    def test_a_classifier_opened_as_a_masked_lm_lacks_the_head(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=f"lacks the tensor {self.case.mlm_tensors}"):
            imported(self.case.model(self.case.classify_class), tmp_path, head="mlm")

    @pytest.mark.parametrize(
        ("content", "num_labels"),
        [
            ({}, 2),
            ({"id2label": None}, 2),
            ({"num_labels": 4}, 4),
            ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, 3),
        ],
    )
    def test_the_number_of_classes_follows_the_labels(
        self, content: dict[str, Any], num_labels: int
    ) -> None:
        content = {"architectures": [self.case.classify_class.__name__], **content}
        config = self.case.read(**content)
        assert (config.head, config.num_labels) == ("classify", num_labels)

    def test_norms_have_the_published_epsilon(self) -> None:
        config = self.case.architecture.config(
            vocab_size=3, d_model=2, num_heads=1, num_layers=2, d_ff=2
        )
        net = self.case.architecture.build(config)
        norms = [part for part in net.modules() if isinstance(part, nn.LayerNorm)]
        assert [norm.eps for norm in norms] == [self.case.norm_eps] * (1 + 2 * 2 + 1)

    def test_dropouts_of_a_classifier_are_those_of_the_paper(self) -> None:
        keys = {"d_model": 8, "num_heads": 2, "num_layers": 2, "d_ff": 8, "vocab_size": 23}
        keys |= {"head": "classify", "dropout": 0.3}
        net, other = (
            self.case.architecture.build(self.case.architecture.config(**keys, **more))
            for more in ({}, {"classifier_dropout": 0.4})
        )
        first, last = self.case.head_dropouts
        assert (net.head.input_dropout.p, net.head.dropout.p) == (first, last)
        assert (other.head.input_dropout.p, other.head.dropout.p) == (0.4 if first else 0, 0.4)

    @pytest.mark.parametrize("kind", [{"tie_embeddings": False}, {"head": "classify"}])
    def test_initial_weights_have_one_standard_deviation(self, kind: dict[str, Any]) -> None:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "vocab_size": 500}
        kinds = {"tie_embeddings": True, "head": "mlm"} | kind
        net = self.case.architecture.build(self.case.architecture.config(**sizes, **kinds))
        std = self.case.std
        assert_initialized(net, std, std / 2**0.5 if self.case.shrinks else None)


class BertParityTests(EncoderParityTests):
    """BERT and RoBERTa, whose base models have a pooler and whose output has two biases."""

    def pooled(self) -> Any:
        return self.case.base_class.base_class

    @torch.no_grad()
    def test_only_the_pooler_is_unused_without_a_head(self, tmp_path: Path) -> None:
        """Import a file of the base model; its states are unchanged."""
        model = self.case.model(self.pooled())
        actual = imported(model, tmp_path)
        (notice,) = actual.notices
        pooler = ["pooler.dense.bias", "pooler.dense.weight"]
        assert notice.endswith(f"ignored tensors that are not in the model: {', '.join(pooler)}")
        back = exported(actual, tmp_path / "exported", self.pooled(), missing=set(pooler))
        ids = torch.stack(self.case.rows(model, [9, 9]))
        torch.testing.assert_close(output(back, ids), output(model, ids), **CLOSE)

    @torch.no_grad()
    def test_an_untied_output_uses_the_bias_of_its_matrix(self, tmp_path: Path) -> None:
        """transformers keeps a second one, which nothing reads."""
        (other,) = (name for name in self.case.tied.values() if name.endswith("bias"))
        model = self.case.model(tie_word_embeddings=False)
        actual = imported(model, tmp_path)
        assert actual.net.head.out.weight is not actual.net.embedding.tokens.weight
        assert [notice.split(": ")[-1] for notice in actual.notices] == [other]
        self.assert_same(model, actual.net)
        again = reread(actual, {})
        assert again.config == actual.config
        assert_same_net(actual.net, again.net)
        back = exported(actual, tmp_path / "exported", self.case.hf_class, missing={other})
        self.assert_same(back, actual.net)


def assert_same_encoder(one: nn.Module, other: nn.Module) -> None:
    """Bit-equal embeddings and layers, whatever the heads."""
    for part in ("embedding", "encoder"):
        assert_same_net(one.get_submodule(part), other.get_submodule(part))
