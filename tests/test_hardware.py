"""The processor's features, read from /proc/cpuinfo."""

from pathlib import Path

import pytest

from heedful import hardware

_TEXT = (
    "processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\nbugs\t\t:\n\nprocessor\t: 1\n"
)
_ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp bf16\nCPU part\t: 0xd40\n"


def _use(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let this be the text of /proc/cpuinfo."""
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: text)


@pytest.mark.parametrize(
    ("vendor", "flags", "is_fast"),
    [
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16 amx_int8", True),
        ("GenuineIntel", "avx2", False),
    ],
)
def test_bf16_is_fast_with_amx_and_with_avx512_of_amd(
    monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, is_fast: bool
) -> None:
    _use(monkeypatch, _TEXT.format(vendor=vendor, flags=flags))
    assert hardware.has_fast_bf16_products() == is_fast
    assert hardware.cpu_flags() == {"fpu", *flags.split()}


def test_features_of_arm_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _ARM)
    assert hardware.cpu_flags() == {"fp", "asimd", "asimddp", "bf16"}
    assert not hardware.has_fast_bf16_products()


def test_a_system_without_cpuinfo_has_no_known_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert hardware.cpu_flags() == frozenset()
    assert not hardware.has_fast_bf16_products()
