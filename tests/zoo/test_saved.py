"""Nets on disk: saved and loaded nets are equal; damaged sizes are refused before a build."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from architectures import SIZES, config_of, configs_of
from heedful.errors import UserError
from heedful.pipelines import ModelMetadata, load, open_net
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.saved import weights_of
from option_space import alone, assert_same, randomized, texts_of

CONFIGS = settings(
    deadline=None,
    max_examples=4,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def saved(name, config, folder, **metadata):
    """A model with random weights, and its folder."""
    torch.manual_seed(0)
    model = open_net(
        randomized(architecture(name).build(config)),
        config,
        ModelMetadata(name, "-", **metadata),
        None,
    )
    model.save(folder)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@CONFIGS
@given(data=st.data())
def test_every_net_is_equal_after_saving_and_loading(name, data):
    config = data.draw(configs_of(name))
    with TemporaryDirectory() as folder:
        model = saved(name, config, Path(folder) / "model")
        opened = load(Path(folder) / "model", device="cpu")
        net = opened.net
        assert opened.config == config
        ours, reference = weights_of(net), weights_of(model.net)
        assert ours.keys() == reference.keys()
        assert all(torch.equal(ours[key], reference[key]) for key in ours)
        texts = texts_of((6, 1, 3))
        assert_same(alone(net.double(), texts), alone(model.net.double(), texts))


HUGE = (1_022, 2**31 - 1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_damaged_size_is_a_one_line_error_or_changes_no_weight(name, tmp_path):
    """Each integer of `config.json` in turn, far too large for the tensors or any memory."""
    config = config_of(name, SIZES, {})
    model = saved(name, config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    messages = []
    for key, value in content["model"].items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        for huge in HUGE:
            keys = content["model"] | {key: huge}
            path.write_text(json.dumps(content | {"model": keys}))
            try:
                ours, reference = (
                    weights_of(load(tmp_path / "model", device="cpu").net),
                    weights_of(model.net),
                )
            except UserError as error:
                messages.append(str(error))
            else:
                assert all(torch.equal(ours[name], reference[name]) for name in reference)
    assert len(messages) >= 2 * 3  # layers, widths and words
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    "change", [{"num_labels": 2}, {"num_labels": None}, {"labels": ["a", "b"]}]
)
def test_labels_that_do_not_fit_the_net_are_a_one_line_error(change, tmp_path):
    config = config_of("bert", SIZES, {"head": "classify", "num_labels": 3})
    saved("bert", config, tmp_path / "model", labels=("a", "b", "c"))
    path = tmp_path / "model" / "config.json"
    content = json.loads(path.read_text())
    (content if "labels" in change else content["model"]).update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"config\.json names \d labels, but its model.num_labels is"
    ):
        load(tmp_path / "model", device="cpu")
