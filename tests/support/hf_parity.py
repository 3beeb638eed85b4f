"""What all models' parity tests share: random models of transformers, and the laws of each case."""

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
from heedful.export.hf import ImportedNet, net_from_hf, net_to_hf
from heedful.export.hf_directory import HfDirectory, read_hf_directory, write_hf_directory
from heedful.parts.dropout import Dropout
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.multi_head import MultiHead
from heedful.parts.residual import ZeroCenteredRMSNorm
from heedful.pipelines import parameter_count
from heedful.zoo import architecture
from heedful.zoo.architectures import Architecture, Format
from heedful.zoo.hf import config_keys_from_hf, config_to_hf
from heedful.zoo.names import from_hf
from heedful.zoo.saved import make_config

CLOSE = {"rtol": 0, "atol": 1e-5}  # of logits whose size is about 1
NEVER = {"num_heads must be at least 1, not 0": {"num_heads": 0}}


class Variant(NamedTuple):
    """One random model that the laws are held to: its class, what its config has, its seed."""

    hf_class: Any
    keys: dict[str, Any]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the laws need to know of an architecture; "theirs" is transformers'.

    Args:
        name: ours.
        hf_config, hf_class: theirs.
        sizes: keys of their config that make it tiny.
        configs: keys beside them, or in their place: the laws hold for each.
        prepare: makes of a random model one that its class could be, given the keys of its config.
        kept: keys of their config that come back from a file of ours as they were.
        left_out: what a config.json that says nothing means by our keys, where these differ.
        not_built: message -> what a config.json may not say (`by_key`).
        other_class: an unsupported class of the model type.
        impossible: message -> what our Config may not say, beside what none may.
        published: size -> parameters, a number or an approximate one (`millions`).
        beyond: how many more the published figure counts than we have.
        counted: a class of theirs that has exactly the published figure's parameters.
        tying: keys of their config by which matrices are tied, where `sizes` leave them untied.
        tied: a tensor that older files hold too -> the one that it repeats and that we write.
        buffers: tensors that older files hold and that are no weights.
        optional: tensors that a file may lack.
        own_dropouts: keys of our Config for dropout that theirs has nowhere.
        lengths: of the texts; with a window long ones, whose queries are taken in several parts.
    """

    name: str
    hf_config: Any
    hf_class: Any
    sizes: dict[str, Any]
    configs: list[dict[str, Any]]
    prepare: Callable[[Any, dict[str, Any]], None] = lambda model, keys: None
    kept: tuple[str, ...] = ()
    left_out: dict[str, Any] = field(default_factory=dict)
    not_built: dict[str, dict[str, Any]]
    other_class: str
    impossible: dict[str, dict[str, Any]] = field(default_factory=dict)
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
        """Our architecture."""
        return architecture(self.name)

    @property
    def format(self) -> Format:
        """Its Hugging Face format."""
        return self.architecture.formats["hf"]

    def variants(self) -> dict[str, Variant]:
        """The models that the laws of outputs and weights are held to, by a name for each."""
        every = enumerate(self.configs)
        return {str(number): Variant(self.hf_class, keys, number) for number, keys in every}

    def model(self, hf_class: Any = None, seed: int = 0, **keys: Any) -> Any:
        """A random tiny model of theirs."""
        config = self.hf_config(**self.sizes | keys)
        model = random_hf(hf_class or self.hf_class, config, seed)
        with torch.no_grad():
            self.prepare(model, keys)
        return model

    def rows(self, model: Any, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
        """Texts for a model of theirs."""
        return random_rows(model.config.vocab_size, lengths, seed)

    def read(self, **content: Any) -> Any:
        """Our Config of a `config.json`."""
        content = {"model_type": self.format.config.model_type} | content
        keys = config_keys_from_hf(
            self.format.config, self.architecture.config, content, "config.json"
        )
        return make_config(self.name, keys, "config.json")

    def net(self, **keys: Any) -> ImportedNet:
        """A random tiny net of ours that their format has a place for, without a file of it."""
        config = self.read(**self.hf_config(**self.sizes | keys).to_dict())
        return ImportedNet(self.name, config, randomised(self.architecture.build(config)), [])


def by_key(**keys: Any) -> dict[str, dict[str, Any]]:
    """Of each key the message that refuses its value by name."""
    return {f"{key} is {value!r}": {key: value} for key, value in keys.items()}


def millions(value: float, within: float = 0.1) -> Any:
    """A published number of parameters, rounded."""
    return pytest.approx(value * 1e6, abs=within * 1e6)


class Laws:
    """What holds for every architecture; each model's test class inherits it and has its case."""

    case: Case

    def assert_same(self, model: Any, net: Any, seed: int = 0) -> None:
        """Our net says what theirs says at every real token, with padding on either side."""
        assert_same_outputs(model, net, self.case.rows(model, self.case.lengths, seed))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        values = {
            "variant": self.case.variants(),
            "unread": self.case.not_built,
            "wrong": NEVER | self.case.impossible,
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
        found = imported(model, tmp_path)
        assert found.notices == []
        self.assert_same(model, found.net, seed)
        back = assert_round_trips(model, found, tmp_path, hf_class)
        for key in self.case.kept:
            assert getattr(back.config, key) == getattr(model.config, key), key
        self.assert_same(back, found.net, seed)

    @torch.no_grad()
    def test_dropout_acts_where_transformers_applies_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At the rate of its place: in its stead stands a function of value and rate."""

        def bend(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
            return x - p * x.sin() if training else x

        monkeypatch.setattr(nn.functional, "dropout", bend)
        monkeypatch.setattr(Dropout, "forward", lambda part, x: bend(x, part.p, part.training))
        monkeypatch.setattr(MultiHead, "_forms_weights", lambda *_: True)
        config = self.case.net().config
        keys = [each.name for each in fields(config) if "dropout" in each.name]
        rates = {key: 0.2 * number for number, key in enumerate(keys, 1)}
        config = replace(config, **rates | dict.fromkeys(self.case.own_dropouts, 0.0))
        net = randomised(self.case.architecture.build(config))
        found = ImportedNet(self.case.name, config, net, [])
        model = exported(found, tmp_path, self.case.hf_class)
        self.assert_same(model, net)
        self.assert_same(model.train(), net.train())

    def test_missing_unknown_and_wrong_tensors_are_refused(self) -> None:
        found = self.case.net()
        names = self.case.format.names(found.config)
        tensors = changed(written(found), dict.fromkeys(names.repeated))

        def refused(message: str, changes: dict[str, Tensor | None]) -> None:
            with pytest.raises(UserError, match=re.escape(message)):
                from_hf(found.net, changed(tensors, changes), names, "file")

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
        found = self.case.net(**self.case.tying)
        embeddings = [part for part in found.net.modules() if isinstance(part, TokenEmbedding)]
        assert all(part.tokens.weight is found.net.head.out.weight for part in embeddings)
        tensors = written(found)
        assert self.case.tied.keys().isdisjoint(tensors)
        for alias, stored in self.case.tied.items():
            with pytest.raises(UserError, match=re.escape(f"{alias} differs from {stored}")):
                reread(found, {alias: tensors[stored] + 1})

    def test_buffers_of_older_files_are_ignored(self) -> None:
        """Tied matrices, beside the one that we write or in its place, and buffers."""
        found = self.case.net(**self.case.tying)
        tensors = written(found)
        repeated = {alias: tensors[stored] for alias, stored in self.case.tied.items()}
        again = reread(found, repeated | self.case.buffers)
        assert again.notices == []
        assert_same_net(again.net, found.net)
        for alias, stored in self.case.tied.items():
            again = reread(found, {stored: None, alias: tensors[stored]})
            assert_same_net(again.net, found.net)

    def test_unsupported_values_are_refused_by_key(self, unread: str) -> None:
        with pytest.raises(UserError, match=re.escape(unread)) as error:
            self.case.read(**self.case.not_built[unread])
        assert str(error.value).startswith("config.json: ")

    def test_an_unsupported_class_is_refused_by_name(self) -> None:
        known = ", ".join(self.case.format.config.classes)
        with pytest.raises(
            UserError, match=f"{self.case.other_class} is not supported; supported: {known}$"
        ):
            self.case.read(architectures=[self.case.other_class])

    def test_missing_keys_have_the_defaults_of_transformers(self) -> None:
        format, bare = self.case.format.config, self.case.read()
        assert bare == self.case.architecture.config(**self.case.left_out)
        full = self.case.read(**self.case.hf_config().to_dict())
        assert config_to_hf(format, bare) == config_to_hf(format, full)

    def test_impossible_values_are_refused(self, wrong: str) -> None:
        with pytest.raises(UserError, match=re.escape(wrong)):
            make_config(self.case.name, (NEVER | self.case.impossible)[wrong])

    def test_sizes_have_the_published_parameters(self, size: str) -> None:
        config = self.case.architecture.config(**self.case.architecture.sizes[size])
        with torch.device("meta"):
            count = parameter_count(self.case.architecture.build(config)) + self.case.beyond(config)
            assert count == self.case.published[size]
            if self.case.counted is not None:
                content = config_to_hf(self.case.format.config, config)
                theirs = self.case.counted(self.case.hf_config(**content))
                assert count == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


# Models


def random_hf(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A model of transformers in eval mode in which no weight is as its initialization left it."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    return option_space.randomised(model_class(config), 0.15)


def randomised(net: nn.Module, seed: int = 0) -> Any:
    """The net in eval mode, no weight as its initialization left it."""
    torch.manual_seed(seed)
    return option_space.randomised(net, 0.2)


def imported(model: Any, directory: Path, **keys: object) -> ImportedNet:
    """The model, saved by transformers and read by heedful."""
    model.save_pretrained(directory)
    return net_from_hf(read_hf_directory(directory), str(directory), **keys)


def exported(
    found: ImportedNet, directory: Path, model_class: Any, missing: Iterable[str] = ()
) -> Any:
    """Our net, written by heedful and loaded by transformers, with just these weights missing."""
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    write_hf_directory(directory, config, tensors)
    model, report = model_class.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert set(report["missing_keys"]) == set(missing), report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    return model.eval()


def assert_drawn(net: nn.Module, std: float, ends: float | None = None) -> None:
    """New weights: matrices of this size, biases zero, norms the identity.

    Args:
        ends: the size of matrices that end a residual branch; None: the same.
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


def written(found: ImportedNet) -> dict[str, Tensor]:
    """The tensors of a file of ours."""
    return net_to_hf(found.architecture, found.config, found.net)[1]


def changed(
    tensors: Mapping[str, Tensor], changes: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """With others added or in place of some; None: left out."""
    both = {**tensors, **changes}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def reread(found: ImportedNet, changes: Mapping[str, Tensor | None]) -> ImportedNet:
    """What heedful writes, read again with these changes."""
    config, tensors = net_to_hf(found.architecture, found.config, found.net)
    return net_from_hf(HfDirectory(config, {}, changed(tensors, changes)), "file")


def assert_same_net(one: nn.Module, other: nn.Module) -> None:
    """Bit-equal weights under the same names."""
    left, right = dict(one.named_parameters()), dict(other.named_parameters())
    assert left.keys() == right.keys()
    for name, parameter in left.items():
        assert torch.equal(parameter, right[name]), name


def assert_round_trips(model: Any, found: ImportedNet, directory: Path, model_class: Any) -> Any:
    """heedful -> HF -> heedful is bit-equal, and transformers loads what we write; that model."""
    back = exported(found, directory / "exported", model_class)
    again = net_from_hf(read_hf_directory(directory / "exported"), "exported")
    assert again.config == found.config
    assert_same_net(found.net, again.net)
    theirs, ours = dict(model.state_dict()), dict(back.state_dict())
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
    return back


# Rows and what is said of them


def output(model: Any, ids: Tensor, mask: Tensor | None = None, **inputs: Any) -> Tensor:
    """Logits of a model of theirs, or its states where it has no head."""
    found = model(ids, attention_mask=mask, **inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@torch.no_grad()
def assert_same_outputs(
    model: Any, net: nn.Module, rows: list[Tensor], types: list[Tensor] | None = None
) -> None:
    """Our net on rows that are padded on either side says what theirs says of them on the right.

    Over there left padding moves the positions unless the caller gives them.
    """
    pad_id = model.config.pad_token_id or 0
    ids, _, mask = padded(rows, "right", pad_id)
    theirs = output(
        model, ids, mask, **({} if types is None else {"token_type_ids": padded(types, "right")[0]})
    )
    for side in ("right", "left"):
        ids, lengths, placed = padded(rows, side, pad_id)
        more = {} if types is None else {"types": padded(types, side)[0]}
        ours = net(ids, lengths, padding_side=side, **more)
        assert ours.shape == theirs.shape
        if ours.dim() == 2:  # a class for each row
            torch.testing.assert_close(ours, theirs, **CLOSE)
        else:
            torch.testing.assert_close(ours[placed.bool()], theirs[mask.bool()], **CLOSE)


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
