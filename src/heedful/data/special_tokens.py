"""Special tokens of a tokenizer: their ids by role, and those around a text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Encoding, models
from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of special tokens by role; `None` where a tokenizer has none.

    `sentinel_ids` replace masked spans, in order (T5's `<extra_id_0>`, `<extra_id_1>`, …).
    `cls_id` and `sep_id` are BERT's first token and separator.
    """

    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    cls_id: int | None = None
    sep_id: int | None = None


def find_specials(roles: Mapping[str, str], id_of: Callable[[str], int | None]) -> SpecialTokens:
    """The special tokens of a tokenizer, by the names of its roles."""
    ids = {f"{role}_id": id_of(name) for role, name in roles.items()}
    if ids.get("unk_id") in (ids.get("bos_id"), ids.get("eos_id")):
        ids["unk_id"] = None  # GPT-2 uses one token for all roles; its bytes are never unknown
    sentinels = [_numbered(name, id_of) for name in ("<extra_id_{}>", "<extra_{}>")]
    return SpecialTokens(**ids, sentinel_ids=sentinels[0] or sentinels[1])


def read_template(
    backend: Backend,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Special tokens before, after and between texts; None for between if pairs differ otherwise.

    They are read off the result of post-processing a text and a pair of texts.
    """
    text = Backend(models.WordLevel({"a": 0}, unk_token="a")).encode("a")

    def parts(pair: Encoding | None) -> list[tuple[int, ...]]:
        encoding = backend.post_process(text, pair, add_special_tokens=True)
        groups: list[tuple[int, ...]] = [()]
        for i, sequence in zip(encoding.ids, encoding.sequence_ids, strict=True):
            groups = [*groups, ()] if sequence is not None else [*groups[:-1], (*groups[-1], i)]
        return groups

    prefix, suffix = parts(None)
    pair_prefix, middle, pair_suffix = parts(text)
    fits = (pair_prefix, pair_suffix) == (prefix, suffix)
    return prefix, suffix, middle if fits else None


def _numbered(name: str, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    ids: list[int] = []
    while (i := id_of(name.format(len(ids)))) is not None:
        ids.append(i)
    return tuple(ids)
