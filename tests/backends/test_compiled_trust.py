"""Native code in a model's folder runs only if this user compiled it here, or says so."""

import grp
import json
import os
import pwd
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import heedful
from backend_models import model_of
from commands import Commands, assert_refused
from heedful.backends.aot import compiled_net, trust
from heedful.backends.aot.compiled_net import CONSTANTS, GRAPHS, KERNEL, TABLE, CompiledFacts
from heedful.backends.aot.trust import check_recorded, described, digest_of, record
from heedful.backends.manifest import BackendChoice, Manifest, conversion_path
from heedful.errors import UserError
from heedful.kernels import build

FACTS = CompiledFacts(family="decoder_only", max_length=16, graphs=["step"])
SOURCE = '#include <cstdio>\n__attribute__((constructor)) void run() { fclose(fopen(MARK, "w")); }'


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A model's folder with a library that makes the file `ran` beside it, its hashes correct."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    place = tmp_path / "model"
    model_of("gpt2").save(place)
    folder = conversion_path(place, "compiled", "float32")
    folder.mkdir(parents=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", folder / KERNEL]
    mark = f'-DMARK="{tmp_path / "ran"}"'
    subprocess.run([*command, mark], input=SOURCE.encode(), check=True)
    (folder / GRAPHS).write_bytes(b"no package")
    name = next(iter(load_file(place / "model.safetensors")))
    (folder / TABLE).write_text(json.dumps({"step": {"a": f"model:{name}", "b": "own:b"}}))
    save_file({"b": torch.ones(2, 3)}, folder / CONSTANTS)
    manifest = Manifest.new(place, "LanguageModel")
    manifest = manifest.with_conversion("compiled", "float32", asdict(FACTS), {})
    best: Any = {use: BackendChoice("compiled", "float32", 1) for use in ("latency", "throughput")}
    replace(manifest, best=best).with_files(place / "backends").write(place)
    return place


def digest_in(place: Path, facts: CompiledFacts = FACTS) -> str:
    """The digest of a shipped folder."""
    folder = conversion_path(place, "compiled", "float32")
    (place / "copy").mkdir(exist_ok=True)
    code = compiled_net.copy_code(folder, place / "copy")
    name, tensor = next(iter(load_file(place / "model.safetensors").items()))
    own = {"a": described(f"model:{name}", tensor), "b": described("own:b", torch.ones(2, 3))}
    return digest_of(code, facts, {"step": own})


def ran(place: Path) -> bool:
    return (place.parent / "ran").exists()


def test_a_library_that_came_with_a_model_is_not_opened(
    commands: Commands, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the net runs and one line says why; a backend by name is refused."""
    assert heedful.load(shipped).backend is None
    [line] = caplog.messages
    assert line.startswith("note: the model runs eager: ")
    assert f"heedful optimize {shipped}" in line
    assert "give trust_compiled=True" in line
    with pytest.raises(UserError, match="was not compiled by you on this machine"):
        heedful.load(shipped, backend="compiled")
    done = commands.run("generate", shipped, "a dog", "--max-new-tokens", 2)
    assert (done.code, done.err.count("\n")) == (0, 1), done.err
    assert "runs eager" in done.err
    done = commands.run("generate", shipped, "a dog", "--backend", "compiled")
    assert_refused(done, "was not compiled by you", "--trust-compiled")
    assert not ran(shipped)


def test_a_library_is_opened_on_request(commands: Commands, shipped: Path) -> None:
    """The file beside its kernels is no package of graphs, which is found afterwards."""
    done = commands.run("generate", shipped, "a", "--trust-compiled", "--backend", "compiled")
    assert_refused(done, "graphs.pt2 is damaged")
    assert ran(shipped)


def test_a_library_that_was_recorded_is_opened(shipped: Path) -> None:
    record(digest_in(shipped))
    with pytest.raises(UserError, match=r"graphs\.pt2 is damaged"):
        heedful.load(shipped, backend="compiled")
    assert ran(shipped)


@pytest.mark.parametrize("change", ["kernel", "graphs", "facts", "constant", "weights"])
def test_a_record_is_of_the_content(shipped: Path, change: str) -> None:
    """Of code, facts, and the sizes that graphs do not check; other content is not opened."""
    record(digest_in(shipped))
    folder = conversion_path(shipped, "compiled", "float32")
    facts = asdict(FACTS)
    if change in ("kernel", "graphs"):
        path = folder / {"kernel": KERNEL, "graphs": GRAPHS}[change]
        path.write_bytes(path.read_bytes() + b"\0")
    elif change == "facts":
        facts["max_length"] = 1 << 30
    elif change == "constant":
        save_file({"b": torch.ones(2, 2)}, folder / CONSTANTS)
    else:
        path = shipped / "model.safetensors"
        tensors = load_file(path)
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name][:1].clone()}, path)
    manifest = Manifest.new(shipped, "LanguageModel")
    manifest = manifest.with_conversion("compiled", "float32", facts, {})
    manifest.with_files(shipped / "backends").write(shipped)
    with pytest.raises(UserError, match="was not compiled by you"):
        heedful.load(shipped, backend="compiled")
    assert not ran(shipped)


def test_what_is_hashed_is_opened(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is replaced after its hash was checked does not run."""
    record(digest_in(shipped))
    kernel = conversion_path(shipped, "compiled", "float32") / KERNEL
    library = kernel.read_bytes()
    kernel.write_bytes(b"harmless")
    record(digest_in(shipped))
    manifest = Manifest.read(shipped)
    assert manifest is not None
    manifest.with_files(shipped / "backends").write(shipped)

    def check_and_replace(*arguments: Any) -> None:
        check_recorded(*arguments)
        kernel.write_bytes(library)

    monkeypatch.setattr(compiled_net, "check_recorded", check_and_replace)
    with pytest.raises(UserError, match="is damaged"):
        heedful.load(shipped, backend="compiled")
    assert not ran(shipped)


def test_a_damaged_table_of_constants_is_one_line(shipped: Path) -> None:
    table = conversion_path(shipped, "compiled", "float32") / TABLE
    for text in ('{"step": []}', '{"step": {"a": "nothing"}}', '{"step": {"a": 1}}'):
        table.write_text(text)
        manifest = Manifest.read(shipped)
        assert manifest is not None
        manifest.with_files(shipped / "backends").write(shipped)
        with pytest.raises(UserError, match=r"constants\.json is damaged"):
            heedful.load(shipped, backend="compiled")


def test_code_is_kept_only_where_other_users_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of a known name in /tmp can be made by anybody before heedful makes it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("HEEDFUL_CACHE", str(shared / "heedful"))
    folder = build.code_folder("kernels")
    assert folder.stat().st_mode & 0o777 == 0o700
    shared.chmod(0o777)
    with pytest.raises(UserError, match=rf"other users can write in {shared}"):
        build.code_folder("kernels")
    with pytest.raises(UserError, match="set HEEDFUL_CACHE to a folder of your own"):
        record("0" * 64)
    shared.chmod(0o1777)  # as /tmp: only owners replace their entries
    build.code_folder("kernels")
    folder.chmod(0o1777)
    with pytest.raises(UserError, match=rf"other users can write in {folder}"):
        build.code_folder("kernels")
    folder.chmod(0o700)


@pytest.mark.parametrize(
    ("group", "users", "members", "is_open"),
    [
        (700, [], [], False),
        (700, [], ["me", "root"], False),
        (700, [("other", 701, 700)], [], True),  # its primary group, which has no list of members
        (700, [("other", 701, 701)], [], False),
        (700, [("alias", 700, 700), ("root", 0, 700)], [], False),
        (700, [("other", 701, 701)], ["other"], True),
        (702, [], [], True),  # not the user's own
        (0, [("operator", 11, 0)], [], False),
    ],
)
def test_users_whose_primary_group_may_write_count(
    group: int,
    users: list[tuple[str, int, int]],
    members: list[str],
    is_open: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(name: str, number: int, primary: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "", number, primary, "", "", ""))

    me = entry("me", 700, 700)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: [me, *(entry(*user) for user in users)])
    names = grp.struct_group(("group", "", group, members))
    monkeypatch.setattr(grp, "getgrgid", lambda number: names)
    assert build._has_others(group) is is_open
    if group == 700:
        monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
        folder = build.code_folder("kernels")
        folder.chmod(0o770)
        own, has_others = folder.stat().st_gid, build._has_others
        monkeypatch.setattr(build, "_has_others", lambda found: found != own or has_others(700))
        if is_open:
            with pytest.raises(UserError, match=rf"other users can write in {folder}"):
                build.code_folder("kernels")
        else:
            assert build.code_folder("kernels") == folder


def test_a_record_is_a_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is none, nor what another user made; recording replaces it."""
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    digest, place = "0" * 64, tmp_path / "model"
    record(digest)
    check_recorded(digest, place, place)
    path = tmp_path / "compiled" / digest
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="was not compiled by you"):
        check_recorded(digest, place, place)
    record(digest)
    check_recorded(digest, place, place)
    assert not path.is_symlink()
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(trust, "records", lambda: path.parent)
        patch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(UserError, match="was not compiled by you"):
            check_recorded(digest, place, place)


def test_a_folder_of_records_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "compiled").symlink_to(tmp_path / "other")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="compiled is a link to another place"):
        record("0" * 64)
    (tmp_path / "link").symlink_to(tmp_path / "cache")  # of the user's own, to the whole cache
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "link"))
    assert build.code_folder("kernels") == tmp_path.resolve() / "cache" / "kernels"


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:  # the superuser can give a folder away
        os.chown(tmp_path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="other users can write in"):
        build.code_folder("kernels")


def test_inductor_does_not_use_its_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    for former in ("", default_cache_dir()):  # torch sets the variable when it is imported
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", former)
        build.use_own_inductor_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path.resolve() / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    build.use_own_inductor_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
