"""`.ci/install.py`: uv has pip's settings, and pip does what uv cannot."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INSTALL = Path(__file__).resolve().parents[1] / ".ci" / "install.py"


@pytest.fixture
def install() -> dict[str, Any]:
    return runpy.run_path(str(INSTALL))


def test_settings_of_pip_are_those_of_uv(install: dict[str, Any]) -> None:
    listing = (
        r":env:.cert='/ca.pem'",
        r"global.extra-index-url='file:///a\nhttps://b/simple'",
        r"global.find-links='/wheels /more'",
        r"global.index-url='https://global'",
        r"global.quiet='1'",
        r"install.index-url='https://install'",
        r"list.format='columns'",
    )
    assert install["variables"]("\n".join(listing)) == {
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX": "file:///a https://b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://install",
    }


def test_settings_are_read(
    install: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By pip itself, and none of uv's own applies."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_QUIET", "1")
    monkeypatch.setenv("UV_RESOLUTION", "lowest")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    settings = install["uv_settings"]()
    assert settings["UV_FIND_LINKS"] == str(tmp_path)
    assert "UV_RESOLUTION" not in settings
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert install["uv_settings"]() is None


def test_a_setting_of_several_files_is_for_pip(install: dict[str, Any]) -> None:
    assert install["variables"]("global.index-url='x'\nglobal.index-url='y'") is None
    assert install["variables"]("global.index-url='x'\n:env:.index-url=''") == {
        "UV_DEFAULT_INDEX": "x"
    }


@pytest.mark.parametrize("setting", ["no-index", "trusted-host", "proxy", "only-binary"])
def test_another_setting_is_for_pip(install: dict[str, Any], setting: str) -> None:
    assert install["variables"](f"global.index-url='x'\n:env:.{setting}='y'") is None


@pytest.mark.parametrize(
    ("settings", "no_uv", "fails", "by"),
    [
        ("", False, False, ["uv"]),
        ("", False, True, ["uv", "pip"]),
        ("", True, False, ["pip"]),
        ("global.constraint='/more'", False, False, ["uv"]),
        ("global.no-index='1'", False, False, ["pip"]),
    ],
)
def test_pip_installs_what_uv_does_not(
    install: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    no_uv: bool,
    fails: bool,
    by: list[str],
) -> None:
    calls: list[str] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        code, out = 0, ""
        if command[-1] == "list":
            out = settings
        elif command[-1] == "uv":
            code = int(no_uv)
        else:
            assert command[-2:] == ["-c", "pins"]
            calls.append(command[2])
            assert ("--constraint=/more" in command) == ("constraint" in settings)
            code = int(fails and command[2] == "uv")
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["install.py", "-c", "pins"])
    if by[-1] == "pip":
        with pytest.raises(SystemExit, match="0"):
            install["main"]()
    else:
        install["main"]()
    assert calls == by
