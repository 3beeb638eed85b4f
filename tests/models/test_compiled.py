"""Compiled nets are traced once per bucket; nets export with lengths, and with the cache as an
argument."""

import pytest

import compiled_nets
from architectures import ARCHITECTURES, tiny
from commands import Commands
from heedful.backends.aot.private import unsupported_reason

NAMES = [*compiled_nets.NETS, "schemes"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[part::2] for part in range(2)], ids="-".join)
def test_nets_compile_once_per_bucket_and_export(commands: Commands, names: list[str]) -> None:
    """Requests of random lengths recompile nothing; nets and position schemes are exported."""
    if unsupported_reason() is not None:
        pytest.skip("this torch compiles no nets ahead of time")
    commands.call(compiled_nets.main, names)


def test_the_compiled_nets_have_the_modules_and_options_of_every_architecture() -> None:
    compiled = {name: compiled_nets.options_of(tiny(name)) for name in compiled_nets.NETS}
    known = set[tuple[str, ...]]().union(*compiled.values())
    for name in ARCHITECTURES:
        assert compiled_nets.options_of(tiny(name)) <= known, name
    for name, options in compiled.items():  # none of them is superfluous
        others = set[tuple[str, ...]]().union(*(compiled[o] for o in compiled if o != name))
        assert not options <= others, name
