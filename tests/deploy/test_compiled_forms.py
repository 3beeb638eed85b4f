"""A compiled net answers as the net itself does, and compiles nothing where it is used."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor import cpp_builder, exc

import compiled_encoders
import compiled_forms
import heedful
from backend_models import model_of
from commands import Commands
from heedful.backends import registry
from heedful.backends.aot import compile as compiling
from heedful.backends.aot.private import unsupported_reason
from heedful.errors import UserError


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skip the test where nets cannot be compiled."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    if unsupported_reason() is not None:
        pytest.skip("this torch compiles no nets ahead of time")


@pytest.fixture(scope="module")
def made(compiler: None, commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a writer and a reader that were optimized; the one compilation of all tests."""
    place = tmp_path_factory.mktemp("compiled")
    commands.call(compiled_forms.make, place)
    return place


@pytest.fixture(scope="module")
def writer(made: Path) -> Path:
    return made / "writer"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_process_compiles_nothing_and_has_the_outputs_of_the_nets(made: Path) -> None:
    """Texts of any length, batch and number of beams; there is no compiler for it to call."""
    command = [sys.executable, compiled_forms.__file__, str(made)]
    environment = os.environ | {"PATH": ""}
    used = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert used.returncode == 0, used.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_encoder_graphs_have_the_outputs_of_the_net_for_any_length(
    compiler: None, commands: Commands
) -> None:
    commands.call(compiled_encoders.graphs)


@pytest.mark.slow
def test_a_mismatched_compilation_is_reported(
    writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shutil.copytree(writer, tmp_path / "model")
    assert heedful.load(place, backend="compiled").backend.name == "compiled"
    manifest = place / "backends" / "backends.json"
    content = json.loads(manifest.read_text())
    content["backends"]["compiled"]["version"] = "2.12.0"
    content["files"] = {}
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"made with torch 2\.12\.0, this is .*heedful optimize"):
        heedful.load(place, backend="compiled")
    assert heedful.load(place).backend is None
    monkeypatch.setattr(registry, "version", lambda name: "2.12.0")
    (place / "backends/compiled/float32/graphs.pt2").write_bytes(b"no package")
    with pytest.raises(UserError, match="was not compiled by you"):
        heedful.load(place, backend="compiled")
    with pytest.raises(UserError, match="is damaged"):
        heedful.load(place, backend="compiled", trust_compiled=True)
    with pytest.raises(UserError, match="runs on the CPU"):
        heedful.load(place, backend="compiled", device="cuda")


@pytest.mark.slow
def test_unsupported_requests_are_reported(writer: Path) -> None:
    model, rows = heedful.load(writer, backend="compiled"), [[5, 6, 7], [8]]
    asked = model.request(rows, draft="lookup", beam_size=1, max_new_tokens=4)
    assert model.backend.unsupported_reasons(rows, asked) == ["it has no option draft"]


def test_without_a_compiler_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unsupported_reason() is not None:
        pytest.skip("this torch compiles no nets ahead of time")

    def missing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"no C\+\+ compiler: install one.*g\+\+"):
        compiling.compile_net(model_of("gpt2").net, 16, tmp_path, "float32")
    assert [*tmp_path.iterdir()] == []
