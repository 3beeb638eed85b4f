"""Damage to files, sampled by Hypothesis: JSON, YAML, weights, and any bytes."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st


class Draw(Protocol):
    """Samples one value of a strategy, as `data.draw` does."""

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any: ...


VALUES = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.0, 10**7, 10**9, 10**18, 2**63, -(2**63)),
        *(1e308, float("nan"), float("inf"), "", "x", "1", "\ud800", "a" * 10_000, "../../x"),
        *("/etc/passwd", [], {}, [[]], [None], {"": {}}, ["a", "a"], [0] * 100, "cpu", "bpe"),
        *({"a": {"b": {"c": 1}}}, ["<mask>"], "F16", "I64", [0, 4], [10**9, 10**9], "HUGE", "DEEP"),
    ]
)
JUNK = (
    *(b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"NaN"),
    *(b"\x80\x04\x95", b"PK\x03\x04", bytes(1000), b"\xff\xfe", '{"a": 1}'.encode("utf-16")),
)
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(12)
)
YAML = (
    *(BOMB, b"[" * 10_000, b"a: " + b"{b: " * 5_000, b"- " * 10_000 + b"x", b"\t", b"{}: 1\n"),
    *(b"!!python/object/apply:os.system [id]", b"a: !!binary x", b"? [1]\n: 2\n", b"1: 2\n"),
    *(b"a: 1\na: 2\n", b"---\na: 1\n---\nb: 2\n", b"&a [*a]", b"<<: [1]\n", b"@", b"\0", b"'"),
    *(b"task: " + b"9" * 5000, b"task: [", b'"\\x', b"training: *b", b"task: !!timestamp x"),
    *(b"training: {seed: 0b12}", b"training: {seed: 1:2:3}", b"task: !!set {a, b}"),
    *(b"data: {generated: {seed: 2001-99-99}}", b"training: ", b"task: copy\n" + b"#" * 1_000_000),
    *(b"a: &x {b: *x}", b"%YAML 9.9\n---\na: 1"),
)
some = st.sampled_from


def damage(draw: Draw, folder: Path, others: list[Path]) -> None:
    """Damage one or two files below a folder, or take them from another of `others`."""
    for _ in range(draw(some((1, 1, 1, 2)))):
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        # Most of a run's files are those of its backends or checkpoints.
        top = [path for path in files if path.parent == folder] or files
        path = draw(st.one_of(some(top), some(files)))
        kind = draw(some(("content", "content", "content", "content", "exchanged", "absent")))
        if kind == "content":
            path.write_bytes(_damage_value(draw, path.suffix, path.read_bytes()))
        elif kind == "exchanged":
            name = path.relative_to(folder)
            actual = [other / name for other in others if (other / name).is_file()]
            shutil.copyfile(draw(some(actual or files)), path) if actual else path.unlink()
        else:
            path.unlink()
            instead = draw(some(("nothing", "folder", "loop")))
            if instead == "folder":
                path.mkdir()
            elif instead == "loop":
                path.symlink_to(path.name)


def damage_json(draw: Draw, data: bytes) -> bytes:
    """JSON with changed, added or removed values or keys."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # damaged before
        return damage_bytes(draw, data)
    places = _locations(content)
    if not places or draw(some((True, False, False, False, False))):
        return draw(st.one_of(some(JUNK), st.just(data[: len(data) // 2]), st.just(data + b"}")))
    for _ in range(draw(some((1, 1, 1, 2)))):
        # The shallow ones, of which there are few, as often as all the others.
        holder, key = draw(st.one_of(some(places[:20]), some(places)))
        kind = draw(some(("value", "value", "value", "value", "absent", "renamed")))
        if key not in holder and not isinstance(holder, list):
            continue
        if kind == "value" or isinstance(holder, list):
            holder[key] = draw(VALUES)
        else:
            value = holder.pop(key)
            if kind == "renamed":
                holder[f"{key}x"] = value
    deep = "[" * 20_000 + "]" * 20_000
    text = json.dumps(content).replace('"HUGE"', "9" * 5000).replace('"DEEP"', deep)
    return text.encode()


def damage_yaml(draw: Draw, data: bytes) -> bytes:
    """Hostile YAML, or YAML with a few bytes replaced."""
    return draw(some(YAML)) if draw(st.booleans()) else damage_bytes(draw, data)


def damage_bytes(draw: Draw, data: bytes) -> bytes:
    """Bytes truncated, doubled, or with some replaced."""
    start = draw(st.integers(0, len(data)))
    more = draw(
        st.one_of(some((b"[", b": ", b"\t", b"\xff", b"*", b"\n\n- x")), st.binary(max_size=3))
    )
    changed = (data[:start], data * 2, data[:start] + more + data[start + len(more) :])
    return draw(some(changed))


def _damage_value(draw: Draw, suffix: str, data: bytes) -> bytes:
    if suffix == ".jsonl":
        lines = data.split(b"\n")
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = damage_json(draw, lines[place])
        return b"\n".join(lines)
    hurt = {".safetensors": _damage_weights, ".json": damage_json, ".yaml": damage_yaml}
    return hurt.get(suffix, damage_bytes)(draw, data)


def _damage_weights(draw: Draw, data: bytes) -> bytes:
    """A safetensors file with a wrong header, length or numbers."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = draw(some(("header", "header", "numbers", "size", "bytes")))
    if kind == "bytes" or len(header) < size:
        return damage_bytes(draw, data)
    if kind == "size":
        return struct.pack("<Q", draw(some((0, 7, 10**8, len(data), 2**63)))) + data[8:]
    if kind == "numbers":
        word = draw(some((b"\0\0\xc0\x7f", b"\0\0\x80\x7f")))  # NaN, infinity
        start = 4 * draw(st.integers(0, len(body) // 4))
        return data[: 8 + size] + body[:start] + word * ((len(body) - start) // 4)
    header = damage_json(draw, header)
    return struct.pack("<Q", len(header)) + header + body


def _locations(content: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value in JSON, the outermost first."""
    actual: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        holder = waiting.pop(0)
        pairs: Any = ()
        if isinstance(holder, dict):
            pairs = holder.items()
        elif isinstance(holder, list):
            pairs = enumerate(holder[:8])
        actual += [(holder, key) for key, _ in pairs]
        waiting += [value for _, value in pairs]
    return actual
