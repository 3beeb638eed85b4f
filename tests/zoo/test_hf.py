"""Directories in the Hugging Face format: reading, writing, and errors."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_gpt2 import GPT2
from torch import Tensor, nn

import heedful.zoo.hf as hf_directory
from heedful.errors import UserError
from heedful.zoo.hf import net_from_hf, read_hf_directory, write_hf_directory

CONFIG = {"model_type": "toy", "width": 3, "Größe": [1, None]}
TENSORS = {"b": torch.randn(2, 3), "a": torch.randn(4).bfloat16(), "ids": torch.arange(3)}


def shards(path: Path, where: dict[str, Any] | None = None) -> Path:
    """A directory of two shards; `where` overrides entries of the index."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": TENSORS["a"]}, path / "one.safetensors")
    save_file({"b": TENSORS["b"], "ids": TENSORS["ids"]}, path / "two.safetensors")
    places = {"a": "one.safetensors", "b": "two.safetensors", "ids": "two.safetensors"}
    index = {"metadata": {"total_size": 0}, "weight_map": places | (where or {})}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def refuses(path: Path, message: str) -> str:
    with pytest.raises(UserError, match=message) as error:
        read_hf_directory(path)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- writing and reading back ---------------------------------------------------------------


@pytest.mark.parametrize("generation", [None, {"num_beams": 4}])
def test_a_written_directory_is_read_back(
    tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    path = tmp_path / "new" / "model"
    write_hf_directory(path, CONFIG, TENSORS, generation)
    actual = read_hf_directory(path)
    assert (actual.config, actual.generation_config) == (CONFIG, generation or {})
    assert same(actual.tensors, TENSORS)
    names = {"config.json", "model.safetensors"} | (
        {"generation_config.json"} if generation else set()
    )
    assert {entry.name for entry in path.iterdir()} == names
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (path / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_views_that_are_not_contiguous_are_written(tmp_path: Path) -> None:
    """A joint matrix is exported as slices of one tensor, some of them transposed."""
    whole = nn.Parameter(torch.randn(6, 4))
    tensors = {"q": whole[:2], "k": whole[2:4].T, "v": whole[4:]}
    write_hf_directory(tmp_path / "m", CONFIG, tensors)
    assert same(read_hf_directory(tmp_path / "m").tensors, tensors)
    assert (tmp_path / "m/model.safetensors").stat().st_size < 6 * 4 * 4 + 400


def test_an_earlier_directory_is_replaced_and_may_be_the_source(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.mkdir()
    write_hf_directory(path, CONFIG, TENSORS, {"a": 1})
    read = read_hf_directory(path)
    write_hf_directory(path, {"model_type": "other"}, read.tensors)
    again = read_hf_directory(path)
    assert (again.config, again.generation_config) == ({"model_type": "other"}, {})
    assert same(again.tensors, TENSORS)
    assert same(read.tensors, TENSORS)  # still there for who has read them before


def test_other_files_of_a_directory_are_never_lost(tmp_path: Path) -> None:
    write_hf_directory(tmp_path, CONFIG, TENSORS)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        write_hf_directory(tmp_path, {"model_type": "other"}, {})
    assert read_hf_directory(tmp_path).config == CONFIG
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="exists already, as a file"):
        write_hf_directory(tmp_path / "thesis.tex", CONFIG, TENSORS)


def test_a_full_disk_keeps_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_directory(tmp_path / "m", CONFIG, TENSORS)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(hf_directory, "write_json", full)
    with pytest.raises(UserError, match="No space left"):
        write_hf_directory(tmp_path / "m", {"model_type": "other"}, TENSORS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]
    assert read_hf_directory(tmp_path / "m").config == CONFIG


# --- shards ---------------------------------------------------------------------------------


def test_shards_and_links_to_them_are_read(tmp_path: Path) -> None:
    """A download cache stores files elsewhere, under their hashes."""
    real = shards(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in real.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert same(read_hf_directory(tmp_path / "snapshot").tensors, TENSORS)


def test_a_missing_or_truncated_shard_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path / "m")
    shard = path / "two.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refuses(path, r"two\.safetensors is not a complete safetensors file")
    shard.unlink()
    refuses(path, r"has no shard two\.safetensors, which holds 2 tensors according")


def test_a_tensor_in_no_shard_or_in_two_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path / "m", {"c": "one.safetensors"})
    refuses(path, r"one\.safetensors has no tensor c,")
    path = shards(tmp_path / "n", {"a": "two.safetensors", "x": "one.safetensors"})
    refuses(path, r"two\.safetensors has no tensor a,")
    path = shards(tmp_path / "o")
    save_file(TENSORS, path / "two.safetensors")
    refuses(path, r"a is in two shards, one\.safetensors and two\.safetensors")


@pytest.mark.parametrize(
    "shard", ["../out.safetensors", "/etc/passwd", "..", ".", "", "sub/x", "..\\x", "\0", 3, None]
)
def test_an_index_cannot_name_files_outside_its_directory(tmp_path: Path, shard: Any) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "out.safetensors")
    refuses(shards(tmp_path / "m", {"a": shard}), "must name a file beside it")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: Any) -> None:
    path = shards(tmp_path / "m")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(path, r"index\.json has no weight_map")


# --- invalid directories ---------------------------------------------------------------------


def test_a_missing_directory_or_config_is_refused(tmp_path: Path) -> None:
    refuses(tmp_path / "nowhere", "nowhere is no directory")
    (tmp_path / "file").write_text("")
    refuses(tmp_path / "file", "file is no directory")
    refuses(tmp_path, r"holds no config\.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": ""}', "has no model_type"),
    ],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(content)
    assert "config.json" in refuses(tmp_path, message)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if "model_type" not in message:
        (tmp_path / "generation_config.json").write_text(content)
        assert "generation_config.json" in refuses(tmp_path, message)


def test_missing_or_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuses(tmp_path, r"holds neither model\.safetensors nor model\.safetensors\.index\.json")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    refuses(tmp_path, r"model\.safetensors is not a complete safetensors file")


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "m.pt", "m.pth", "m.ckpt", "m.pkl"],
)
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    """Opening the file here would create another file."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "opened",))

    torch.save(Trap(), tmp_path / name)
    config = {**CONFIG, "architectures": ["ToyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refuses(tmp_path, f"only {name}, a pickled file, which can run code")
    assert f"ToyForCausalLM.from_pretrained('{tmp_path}').save_pretrained(" in message
    assert "safe_serialization=True" in message
    assert not (tmp_path / "opened").exists()
    (tmp_path / name).rename(tmp_path / "model.safetensors")  # nor under a trusted name
    refuses(tmp_path, "is not a complete safetensors file")
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("name", "classes", "said"),
    [
        ("tf_model.h5", None, "from_tf=True"),
        ("flax_model.msgpack", None, "from_flax=True"),
        # Only a plain name goes into the advice.
        *(("m.bin", classes, "AutoModel") for classes in (["os; evil()"], [3], [], "GPT2", None)),
    ],
)
def test_the_error_for_other_weights_says_how_to_convert_them(
    tmp_path: Path, name: str, classes: Any, said: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": classes}))
    message = refuses(tmp_path, f"only {name}, (of another framework|a pickled file)")
    version = " 4" if "from_" in said else ""  # later versions read no other framework
    assert f"transformers{version}: AutoModel.from_pretrained('{tmp_path}'" in message
    assert said in message
    assert message.endswith("copy the files of its tokenizer to NEW")


# --- a real one -----------------------------------------------------------------------------


def test_the_shards_of_a_real_gpt2_are_read(tmp_path: Path) -> None:
    model = GPT2.model()
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    net = net_from_hf(read_hf_directory(tmp_path), "file").net
    ids = torch.randint(0, 23, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(net(ids), model(ids).logits, rtol=0, atol=1e-5)
