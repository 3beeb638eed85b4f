"""Parity tests of all architectures: random models of transformers, and tests of each case."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as transformers
from torch import Tensor, nn

import option_space
from heedful.errors import UserError
from heedful.parts.attention import MultiHead
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.residual import Dropout, ZeroCenteredRMSNorm
from heedful.pipelines import parameter_count
from heedful.zoo import architecture
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.hf import (
    HfDirectory,
    ImportedNet,
    config_keys_from_hf,
    config_to_hf,
    net_from_hf,
    net_to_hf,
    read_hf_directory,
    write_hf_directory,
)
from heedful.zoo.names import from_hf
from heedful.zoo.saved import make_config

CLOSE = {"rtol": 0, "atol": 1e-5}  # of logits whose size is about 1
ALWAYS_INVALID = {"num_heads must be at least 1, not 0": {"num_heads": 0}}


class Variant(NamedTuple):
    """One random model to test: its class, keys of its config, and its seed."""

    hf_class: Any
    keys: dict[str, Any]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture to test; "ours" is heedful's, "hf" that of transformers.

    Args:
        name: name in `heedful.zoo`.
        hf_config, hf_class: config and model class of transformers.
        sizes: keys of `hf_config` for a tiny model.
        configs: further keys, which are added to `sizes` or replace some: all are tested.
        prepare: sets tensors of a random model that its class never leaves random.
        kept: keys of `hf_config` that an export preserves.
        missing_key_values: keys of our Config for an empty config.json, if not our defaults.
        unsupported: error message -> keys of config.json that cause it (`by_key`).
        other_class: an unsupported class of the model type.
        invalid: error message -> keys of our Config that cause it.
        published: size -> parameters, a number or an approximate one (`millions`).
        beyond: parameters that the published number counts in addition to ours.
        counted: a class of transformers with exactly the published number of parameters.
        tying: keys of `hf_config` that tie matrices, if `sizes` do not.
        tied: name of a tensor in older files -> name of the equal tensor that is exported.
        buffers: tensors in older files that are not weights.
        optional: tensors that a file may lack.
        own_dropouts: dropout keys of our Config that transformers does not have.
        lengths: of the texts; long ones for a window, whose queries are computed in blocks.
    """

    name: str
    hf_config: Any
    hf_class: Any
    sizes: dict[str, Any]
    configs: list[dict[str, Any]]
    prepare: Callable[[Any, dict[str, Any]], None] = lambda model, keys: None
    kept: tuple[str, ...] = ()
    missing_key_values: dict[str, Any] = field(default_factory=dict)
    unsupported: dict[str, dict[str, Any]]
    other_class: str
    invalid: dict[str, dict[str, Any]] = field(default_factory=dict)
    published: dict[str, Any]
    beyond: Callable[[Any], int] = lambda config: 0
    counted: Any = None
    tying: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    own_dropouts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (7, 3, 11, 1)

    @property
    def architecture(self) -> Architecture:
        """The architecture in `heedful.zoo`."""
        return architecture(self.name)

    @property
    def format(self) -> Format:
        """Its Hugging Face format."""
        return self.architecture.formats["hf"]

    def variants(self) -> dict[str, Variant]:
        """The models whose outputs and weights are compared, by name."""
        every = enumerate(self.configs)
        return {str(number): Variant(self.hf_class, keys, number) for number, keys in every}

    def model(self, hf_class: Any = None, seed: int = 0, **keys: Any) -> Any:
        """A random tiny model of transformers."""
        config = self.hf_config(**self.sizes | keys)
        model = random_hf(hf_class or self.hf_class, config, seed)
        with torch.no_grad():
            self.prepare(model, keys)
        return model

    def rows(self, model: Any, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
        """Random texts for a model of transformers."""
        return random_rows(model.config.vocab_size, lengths, seed)

    def read(self, **content: Any) -> Any:
        """Our Config of a `config.json`."""
        content = {"model_type": self.format.config.model_type} | content
        keys = config_keys_from_hf(
            self.format.config, self.architecture.config, content, "config.json"
        )
        return make_config(self.name, keys, "config.json")

    def net(self, **keys: Any) -> ImportedNet:
        """A random tiny net of heedful that the format supports, not read from a file."""
        config = self.read(**self.hf_config(**self.sizes | keys).to_dict())
        return ImportedNet(self.name, config, randomized(self.architecture.build(config)), [])


def by_key(**keys: Any) -> dict[str, dict[str, Any]]:
    """The error message by key, which names the key."""
    return {f"{key} is {value!r}": {key: value} for key, value in keys.items()}


def millions(value: float, within: float = 0.1) -> Any:
    """A published number of parameters, rounded."""
    return pytest.approx(value * 1e6, abs=within * 1e6)


class ParityTests:
    """Tests of every architecture; the test class of each model inherits them and sets `case`."""

    case: Case

    def assert_same(self, model: Any, net: Any, seed: int = 0) -> None:
        """Outputs are equal at every real token, with padding on either side."""
        assert_same_outputs(model, net, self.case.rows(model, self.case.lengths, seed))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values = {
            "variant": self.case.variants(),
            "unsupported_key": self.case.unsupported,
            "wrong": ALWAYS_INVALID | self.case.invalid,
            "size": self.case.published | self.case.architecture.sizes,
        }
        for name, cases in values.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(cases))

    @torch.no_grad()
    def test_outputs_and_exported_weights_equal_transformers(
        self, variant: str, tmp_path: Path
    ) -> None:
        hf_class, keys, seed = self.case.variants()[variant]
        model = self.case.model(hf_class, seed, **keys)
        actual = imported(model, tmp_path)
        assert actual.notices == []
        self.assert_same(model, actual.net, seed)
        back = assert_round_trips(model, actual, tmp_path, hf_class)
        for key in self.case.kept:
            assert getattr(back.config, key) == getattr(model.config, key), key
        self.assert_same(back, actual.net, seed)

    @torch.no_grad()
    def test_dropout_acts_where_transformers_applies_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With each rate: dropout is replaced by a deterministic function of value and rate."""

        def bend(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
            return x - p * x.sin() if training else x

        monkeypatch.setattr(nn.functional, "dropout", bend)
        monkeypatch.setattr(Dropout, "forward", lambda part, x: bend(x, part.p, part.training))
        config = self.case.net().config
        keys = [item.name for item in fields(config) if "dropout" in item.name]
        rates = {key: 0.2 * number for number, key in enumerate(keys, 1)}
        config = replace(config, **rates | dict.fromkeys(self.case.own_dropouts, 0.0))
        net = randomized(self.case.architecture.build(config))
        for module in net.modules():
            if isinstance(module, MultiHead):  # a fused kernel drops weights by itself
                module.weights_hook.register_forward_hook(lambda *_: None)
        actual = ImportedNet(self.case.name, config, net, [])
        model = exported(actual, tmp_path, self.case.hf_class)
        self.assert_same(model, net)
        self.assert_same(model.train(), net.train())

    def test_missing_unknown_and_wrong_tensors_are_refused(self) -> None:
        actual = self.case.net()
        names = self.case.format.names(actual.config)
        tensors = changed(written(actual), dict.fromkeys(names.repeated))

        def refused(message: str, changes: dict[str, Tensor | None]) -> None:
            with pytest.raises(UserError, match=re.escape(message)):
                from_hf(actual.net, changed(tensors, changes), names, "file")

        needed = dict.fromkeys(tensors.keys() - set(self.case.optional))
        refused(f"file lacks the tensor {min(needed)} (and {len(needed) - 1} more)", needed)
        layer = {name: tensor for name, tensor in tensors.items() if ".0." in name}
        another = {name.replace(".0.", ".9.", 1): tensor for name, tensor in layer.items()}
        refused(f"not in the model: {min(another)} (and {len(another) - 1} more)", another)
        for name, tensor in tensors.items():
            if name in layer or not re.search(r"\.\d+\.", name):
                longer = torch.cat([tensor, tensor[:1]])
                refused(f"file: {name} is {tuple(longer.shape)}, but", {name: longer})

    def test_tied_matrices_are_written_once(self) -> None:
        actual = self.case.net(**self.case.tying)
        embeddings = [part for part in actual.net.modules() if isinstance(part, TokenEmbedding)]
        assert all(part.tokens.weight is actual.net.head.out.weight for part in embeddings)
        tensors = written(actual)
        assert self.case.tied.keys().isdisjoint(tensors)
        for alias, stored in self.case.tied.items():
            with pytest.raises(UserError, match=re.escape(f"{alias} differs from {stored}")):
                reread(actual, {alias: tensors[stored] + 1})

    def test_buffers_of_older_files_are_ignored(self) -> None:
        """Tied matrices, in addition to the exported one or instead of it, and buffers."""
        actual = self.case.net(**self.case.tying)
        tensors = written(actual)
        repeated = {alias: tensors[stored] for alias, stored in self.case.tied.items()}
        again = reread(actual, repeated | self.case.buffers)
        assert again.notices == []
        assert_same_net(again.net, actual.net)
        for alias, stored in self.case.tied.items():
            again = reread(actual, {stored: None, alias: tensors[stored]})
            assert_same_net(again.net, actual.net)

    def test_unsupported_values_are_refused_by_key(self, unsupported_key: str) -> None:
        with pytest.raises(UserError, match=re.escape(unsupported_key)) as error:
            self.case.read(**self.case.unsupported[unsupported_key])
        assert str(error.value).startswith("config.json: ")

    def test_an_unsupported_class_is_refused_by_name(self) -> None:
        known = ", ".join(self.case.format.config.classes)
        with pytest.raises(
            UserError, match=f"{self.case.other_class} is not supported; supported: {known}$"
        ):
            self.case.read(architectures=[self.case.other_class])

    def test_missing_keys_have_the_defaults_of_transformers(self) -> None:
        format, bare = self.case.format.config, self.case.read()
        assert bare == self.case.architecture.config(**self.case.missing_key_values)
        full = self.case.read(**self.case.hf_config().to_dict())
        assert config_to_hf(format, bare) == config_to_hf(format, full)

    def test_impossible_values_are_refused(self, wrong: str) -> None:
        with pytest.raises(UserError, match=re.escape(wrong)):
            make_config(self.case.name, (ALWAYS_INVALID | self.case.invalid)[wrong])

    def test_sizes_have_the_published_parameters(self, size: str) -> None:
        config = self.case.architecture.config(**self.case.architecture.sizes[size])
        with torch.device("meta"):
            count = parameter_count(self.case.architecture.build(config)) + self.case.beyond(config)
            assert count == self.case.published[size]
            if self.case.counted is not None:
                content = config_to_hf(self.case.format.config, config)
                reference = self.case.counted(self.case.hf_config(**content))
                assert count == sum(p.numel() for p in reference.parameters() if p.requires_grad)


# Models


def saved_tokenizer(directory: Path, name: str) -> Any:
    """The tokenizer of an export; of qwen2 the Auto class makes Qwen's own of any other."""
    kind = "PreTrainedTokenizerFast" if name == "qwen2" else "AutoTokenizer"
    return getattr(transformers, kind).from_pretrained(directory)


def random_hf(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model of transformers in eval mode with every weight random."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    return option_space.randomized(model_class(config), 0.15)


def randomized(net: nn.Module, seed: int = 0) -> Any:
    """The net in eval mode with every weight random."""
    torch.manual_seed(seed)
    return option_space.randomized(net, 0.2)


def imported(model: Any, directory: Path, **keys: object) -> ImportedNet:
    """The model, saved by transformers and read by heedful."""
    model.save_pretrained(directory)
    return net_from_hf(read_hf_directory(directory), str(directory), **keys)


def exported(
    imported_net: ImportedNet, directory: Path, model_class: Any, missing: Iterable[str] = ()
) -> Any:
    """A net exported by heedful and loaded by transformers, with exactly these weights missing."""
    config, tensors = net_to_hf(imported_net.architecture, imported_net.config, imported_net.net)
    write_hf_directory(directory, config, tensors)
    model, report = model_class.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert set(report["missing_keys"]) == set(missing), report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def assert_initialized(net: nn.Module, std: float, ends: float | None = None) -> None:
    """New weights: matrices of this standard deviation, biases zero, norms the identity.

    Args:
        ends: the deviation of matrices that end a residual branch; None: the same.
    """
    last = re.compile(r".*sublayer(\..+)?\.(out|down)\.weight")
    centered = {id(part.weight) for part in net.modules() if isinstance(part, ZeroCenteredRMSNorm)}
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            size = ends if ends is not None and last.fullmatch(name) else std
            error = (2 * parameter.numel()) ** -0.5  # of a measured standard deviation
            assert parameter.std().item() == pytest.approx(size, rel=4 * error), name
        else:
            value = name.endswith("norm.weight") and id(parameter) not in centered
            assert torch.equal(parameter, torch.full_like(parameter, value)), name


# Files


def written(imported_net: ImportedNet) -> dict[str, Tensor]:
    """The tensors of a file written by heedful."""
    return net_to_hf(imported_net.architecture, imported_net.config, imported_net.net)[1]


def changed(
    tensors: Mapping[str, Tensor], changes: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """With others added or in place of some; None: left out."""
    both = {**tensors, **changes}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def reread(imported_net: ImportedNet, changes: Mapping[str, Tensor | None]) -> ImportedNet:
    """The net that heedful writes, read again with these changes."""
    config, tensors = net_to_hf(imported_net.architecture, imported_net.config, imported_net.net)
    return net_from_hf(HfDirectory(config, {}, changed(tensors, changes)), "file")


def assert_same_net(one: nn.Module, other: nn.Module) -> None:
    """Bit-equal weights under the same names."""
    left, right = dict(one.named_parameters()), dict(other.named_parameters())
    assert left.keys() == right.keys()
    for name, parameter in left.items():
        assert torch.equal(parameter, right[name]), name


def assert_round_trips(
    model: Any, imported_net: ImportedNet, directory: Path, model_class: Any
) -> Any:
    """heedful -> HF -> heedful is bit-equal, and transformers loads what we write; that model."""
    back = exported(imported_net, directory / "exported", model_class)
    again = net_from_hf(read_hf_directory(directory / "exported"), "exported")
    assert again.config == imported_net.config
    assert_same_net(imported_net.net, again.net)
    reference, ours = dict(model.state_dict()), dict(back.state_dict())
    assert reference.keys() == ours.keys()
    for name, tensor in reference.items():
        assert torch.equal(tensor, ours[name]), name
    return back


# Rows, and outputs for them


def output(model: Any, ids: Tensor, mask: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits of a model of transformers, or its states if it has no head."""
    actual = model(ids, attention_mask=mask, **inputs)
    return actual.logits if hasattr(actual, "logits") else actual.last_hidden_state


@torch.no_grad()
def assert_same_outputs(
    model: Any, net: nn.Module, rows: list[Tensor], types: list[Tensor] | None = None
) -> None:
    """Outputs for rows padded on either side equal those of transformers, padded on the right.

    In transformers left padding shifts the positions, unless the caller passes them.
    """
    pad_id = model.config.pad_token_id or 0
    ids, _, mask = padded(rows, "right", pad_id)
    reference = output(
        model, ids, mask, **({} if types is None else {"token_type_ids": padded(types, "right")[0]})
    )
    for side in ("right", "left"):
        ids, lengths, placed = padded(rows, side, pad_id)
        more = {} if types is None else {"types": padded(types, side)[0]}
        ours = net(ids, lengths, padding_side=side, **more)
        assert ours.shape == reference.shape
        if ours.dim() == 2:  # a class for each row
            torch.testing.assert_close(ours, reference, **CLOSE)
        else:
            torch.testing.assert_close(ours[placed.bool()], reference[mask.bool()], **CLOSE)


def padded(rows: list[Tensor], side: str, pad_id: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as one batch, their lengths, and transformers' attention mask."""
    mask = option_space.pad([torch.ones_like(row) for row in rows], side)
    return option_space.pad(rows, side, pad_id=pad_id), mask.sum(1), mask


def random_rows(
    vocab_size: int, lengths: Sequence[int], seed: int = 0, low: int = 0
) -> list[Tensor]:
    """One row of random ids from `low` on for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, vocab_size, (length,), generator=generator) for length in lengths]
