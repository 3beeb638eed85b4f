"""Translations that keep the pieces of their sources, each as often as the source has it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.fidelity import (
    count_masks,
    differences,
    mask_id,
    mask_text,
    place_masks,
    separate_masks,
    unmask,
    with_accelerator,
)
from heedful.options import Options
from heedful.pipelines.generations import Generation

if TYPE_CHECKING:
    from heedful.pipelines.translation import Translator

_HYPOTHESES = 5  # of a further beam search, of which the first with all pieces is taken
# With these a search cannot be repeated for one text.
_OF_ALL_TEXTS = ("prefixes", "forced", "prefix_function", "draft")


def kept_generations(
    model: "Translator", text: str, outputs: list[Generation], options: Options
) -> list[Generation]:
    """Outputs for the masks of a text, with its pieces in place of them.

    A best output that lacks a piece, or has one that is not in the source, is searched for again:
    among more hypotheses, and then with the pieces required. What is still wrong, and all other
    outputs, are put right by position, with a reason.
    """
    assert model.metadata.keep is not None
    source = _Source(text, model.metadata.keep.patterns)
    if len(outputs) == 1 and not source.is_kept_by(outputs[0]):
        outputs = [_search_again(model, source, outputs[0], options)]
    return [source.restored(output) for output in outputs]


class _Source:
    """A source and its masks."""

    def __init__(self, text: str, patterns: tuple[str, ...]) -> None:
        self.text, self.patterns = text, patterns
        self.masked = mask_text(text, patterns)
        self.masks = count_masks(self.masked.text)

    def is_kept_by(self, output: Generation) -> bool:
        """True if an output has the masks of the source, each as often, and no other pieces."""
        if count_masks(output.text) != self.masks:
            return False
        restored = unmask(output.text, self.masked.pieces)
        return not differences(self.text, restored, self.patterns)

    def restored(self, output: Generation) -> Generation:
        """An output with pieces in place of masks; with reasons, where its pieces are wrong."""
        placed, reasons = place_masks(self.masked, output.text)
        text = unmask(placed, self.masked.pieces)
        wrong = differences(self.text, text, self.patterns)
        if wrong:  # an address that a word continues, for example
            apart = unmask(separate_masks(placed), self.masked.pieces)
            if not differences(self.text, apart, self.patterns):
                text, wrong = apart, ["pieces were joined with words and are separated"]
        reasons += tuple(wrong)
        return replace(output, text=with_accelerator(self.text, text), reasons=reasons)


def _search_again(
    model: "Translator", source: _Source, first: Generation, options: Options
) -> Generation:
    """An output with all masks of the source, if one is found, else the first output."""
    if options.samples or any(getattr(options, name) is not None for name in _OF_ALL_TEXTS):
        return first
    metadata = model.metadata
    if (metadata.language_tags or metadata.language_codes) and options.tgt_language is None:
        return first  # the language was chosen by ids
    again = replace(options, keep=False, on_output=None, progress=None)
    size = max(_HYPOTHESES, options.beam_size or 0)
    wider = replace(again, beam_size=size, num_return=size)
    if options.num_groups == 1:
        for output in model.generations([source.masked.text], wider)[0]:
            if source.is_kept_by(output):
                return output
    tokens = [[mask_id(model.tgt_tokenizer, mask)] for mask in source.masks.elements()]
    required = replace(again, require=[*options.require, *tokens], coverage_penalty=0.0)
    for output in model.generations([source.masked.text], required)[0]:
        if source.is_kept_by(output):
            return output
    return first
