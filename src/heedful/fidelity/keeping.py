"""Translations that keep the pieces of their sources, each as often as the source has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from heedful.fidelity.accelerators import with_accelerator
from heedful.fidelity.masking import Masked, count_masks, mask_text, source_mask, unmask
from heedful.pipelines import Translator

_HYPOTHESES = 5  # of a beam search, among which the first with all pieces is taken

Found = Literal["first", "other", "required", "placed"]


@dataclass(frozen=True)
class Kept:
    """A translation.

    Attributes:
        reasons: why a person must look at it; empty: it has all pieces, and no other ones.
        found: it is the best hypothesis; another one of its beam; one of a search that requires the
            pieces; or pieces were placed, or removed, after the search.
    """

    text: str
    reasons: tuple[str, ...]
    found: Found


def translate_kept(
    model: Translator, texts: Sequence[str], extra: tuple[str, ...] = (), **options: Any
) -> list[Kept]:
    """Translations by a model that was trained with masks.

    Texts whose best hypothesis lacks a piece, or has one that is not in the source, are decoded
    again: first for more hypotheses, then with the pieces required. What is still wrong is put
    right by position, with a reason.

    Args:
        extra: regular expressions of further placeholders.
        options: as of `Translator.translate`.
    """
    masked = [mask_text(text, extra) for text in texts]
    outputs: list[str] = model.generate([item.text for item in masked], **options)
    found: dict[int, tuple[str, Found]] = {}
    for row, (item, output) in enumerate(zip(masked, outputs, strict=True)):
        found[row] = output, "first"
        if not is_faithful(item, output):
            found[row] = _search_again(model, item, output, options)
    results = []
    for row, item in enumerate(masked):
        output, how = found[row]
        reasons: tuple[str, ...] = ()
        if how == "placed":
            output, reasons = place_masks(item, output)
        text = unmask(output, item.pieces)
        results.append(Kept(with_accelerator(texts[row], text), reasons, how))
    return results


def is_faithful(source: Masked, output: str) -> bool:
    """True if an output has the masks of its source, each as often."""
    return count_masks(source.text) == count_masks(output)


def _search_again(
    model: Translator, source: Masked, first: str, options: dict[str, Any]
) -> tuple[str, Found]:
    """A hypothesis with all masks, if one is found."""
    wider = {**options, "beam_size": max(_HYPOTHESES, options.get("beam_size") or 0)}
    wider["num_return"] = wider["beam_size"]
    for hypothesis in model.generate(source.text, **wider):
        if is_faithful(source, hypothesis):
            return hypothesis, "other"
    required = [*count_masks(source.text).elements()]
    hypothesis = model.generate(source.text, **options, require=required)
    if is_faithful(source, hypothesis):
        return hypothesis, "required"
    return first, "placed"


def place_masks(source: Masked, output: str) -> tuple[str, tuple[str, ...]]:
    """The output with exactly the masks of its source, and what was changed.

    Of masks too many the first ones stay. A missing one is put at its relative position, beside a
    space.
    """
    left = count_masks(source.text)
    reasons: list[str] = []
    kept: list[str] = []
    for character in output:
        mask = source_mask(character)
        if mask is None or left[mask]:
            left[mask or ""] -= 1
            kept.append(character)
            continue
        name = source.pieces.get(mask)
        reasons.append("an unknown piece was removed" if name is None else f"{name} was repeated")
        if kept[-1:] == [" "]:
            kept.pop()
    for place, mask in enumerate(source.text):
        if mask in source.pieces and left[mask] > 0:
            left[mask] -= 1
            reasons.append(f"{source.pieces[mask]} was missing and is placed by its position")
            kept = _placed(kept, mask, place / len(source.text))
    return "".join(kept), tuple(reasons)


def _placed(characters: list[str], mask: str, share: float) -> list[str]:
    """The characters with a mask at the space nearest to a share of their length."""
    wanted = share * len(characters)
    spaces = [place for place, character in enumerate(characters) if character == " "]
    place = min([0, *spaces, len(characters)], key=lambda place: abs(place - wanted))
    inserted = [" ", mask] if place else [mask, " "]
    return [*characters[:place], *inserted, *characters[place:]]
