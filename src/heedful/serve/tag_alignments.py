"""Alignments by which tags are put into translations, computed on the thread of a model."""

from collections.abc import Sequence
from typing import Any

from heedful.documents.word_links import TokenAlignment
from heedful.pipelines import Translator
from heedful.pipelines.generations import Generation
from heedful.serve.batches import Job, OnOutput
from heedful.serve.bodies import TranslateBody
from heedful.serve.markup import HtmlParts, Parts
from heedful.serve.models import ServedModel

TagAlignments = dict[tuple[str, str], TokenAlignment | None]  # by a row and its translation


def language_options(model: Translator, body: TranslateBody) -> dict[str, Any]:
    """The options that name the languages of a request, where the model chooses by them."""
    named = {"tgt_language": body.target} if model.metadata.language_tags else {}
    if model.metadata.language_codes:
        source = None if body.source == "auto" else body.source
        named = {"src_language": source, "tgt_language": body.target}
    return {name: code for name, code in named.items() if code is not None}


def alignment_job(
    served: ServedModel, items: Sequence[tuple[str, Generation]], body: TranslateBody
) -> Job:
    """The alignment of each text with its output, by the net for any backend."""
    languages = language_options(served.model, body)

    def run(rows: list[tuple[str, Generation]], report: OnOutput) -> list[Any]:
        """The alignments of some rows."""
        texts, outputs = zip(*rows, strict=True)
        found: list[TokenAlignment | None] = served.model.token_alignments(
            texts, outputs, **languages
        )
        return found

    key = ("tags", tuple(sorted(languages.items())))
    return Job(key, [*items], [len(output.ids) for _, output in items], run)


async def alignments_of_tags(
    served: ServedModel,
    texts: Sequence[Parts | HtmlParts],
    results: Sequence[tuple[Sequence[Generation], Any]],
    body: TranslateBody,
) -> TagAlignments:
    """Those of the rows of texts with tags between their words.

    Args:
        results: of each row its hypotheses.
    """
    cut = {row for text in texts for row in text.cut_rows}
    rows = [row for text in texts for row in text.rows]
    pairs = {
        (row, output.text): output
        for row, (outputs, _) in zip(rows, results, strict=True)
        if row in cut
        for output in outputs
    }
    items = [(row, output) for (row, _), output in pairs.items()]
    return dict(zip(pairs, await served.run(alignment_job(served, items, body)), strict=True))
