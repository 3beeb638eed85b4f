"""LibreTranslate's routes: translation, its languages, and the detection of a text's language."""

import asyncio
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from heedful import extras
from heedful.documents import FORMATS, Segment, language_review
from heedful.documents.translating import (
    Review,
    fits_model,
    review_reasons,
    too_long_words,
    worst_quality,
)
from heedful.errors import UserError
from heedful.fidelity.reasons import Reason, code_of
from heedful.options import Options
from heedful.pipelines import Translator
from heedful.pipelines.generations import Generation
from heedful.pipelines.keeping import glossary_for
from heedful.pipelines.requests import options_for_ids
from heedful.serve.batches import Job, OnOutput
from heedful.serve.bodies import MAX_TEXT, DetectBody, TranslateBody
from heedful.serve.directions import (
    confidence,
    detected_languages,
    known_sources,
    translator_for,
    translators_of,
)
from heedful.serve.errors import HttpError, as_http_error, over_limit
from heedful.serve.guard import info_of
from heedful.serve.languages import detect, name_of, sources_of, targets_of
from heedful.serve.markup import HtmlParts, Parts, parts_of
from heedful.serve.models import ServedModel
from heedful.serve.requests import as_list, encoded, registry_of, reserve
from heedful.serve.tag_alignments import TagAlignments, alignments_of_tags, language_options

router = APIRouter(tags=["LibreTranslate"])
_ALIGNED = 32  # outputs that are aligned in one pass, whose attention weights are in memory

Alignment = dict[str, Any]
Result = tuple[Sequence[Generation], list[Alignment]]  # of a row: its hypotheses, best first
Texts = list[Parts | HtmlParts]
# The indices of a translator's texts; beside one that reads several languages the detected one.
Groups = dict[tuple[ServedModel, str | None], list[int]]


class Translation(NamedTuple):
    """A translation of a text, or an alternative to it.

    Attributes:
        reasons: why a person should review it; of an alternative none are looked for.
        quality: from 0 to 100, likewise; NaN: it was not asked for, or nothing was translated.
    """

    text: str
    score: float
    alignment: Alignment
    reasons: Sequence[str] = ()
    quality: float = math.nan


@router.post("/translate")
async def translate(body: TranslateBody, request: Request) -> Response:
    """Translate a text, or a list of texts as one batch; JSON or a form.

    The sentences of each line are translated one by one, long ones in clauses, and blank lines are
    kept; of HTML those of its blocks, with tags in a line put into the translation by the alignment
    of words. Words that are too long for the model are kept.
    `alternatives` are further hypotheses of a beam search. With `source` auto the language of each
    text is detected. Alignments are computed by the net itself, whichever backend translates.
    `reasons` in the answer say why a person should review a translation; mostly it is empty.
    `reasonCodes` has the same for programs.
    """
    settings = registry_of(request).settings
    if 1 + body.alternatives > settings.max_outputs:
        most = settings.max_outputs - 1
        message = f"alternatives may be at most {most} here, not {body.alternatives}"
        raise over_limit(message, "alternatives", body.alternatives, most)
    texts, groups, detected = await _groups(request, body)
    info = info_of(request.scope)
    translations: dict[int, list[Translation]] = {}
    for (served, source), indices in groups.items():
        rows = [row for index in indices for row in texts[index].rows]
        own_body = body.model_copy(update={"source": source}) if source else body
        job, num_tokens = await translation_job(served, rows, own_body)
        results = await served.run(job)
        info.num_prompt += num_tokens
        info.num_new += sum(len(output.ids) for outputs, _ in results for output in outputs)
        own = [texts[index] for index in indices]
        known = await alignments_of_tags(served, own, results, own_body)
        language = served.model.metadata.src_language or own_body.source
        joined = await asyncio.to_thread(_all_joined, own, results, known, language)
        translations |= zip(indices, joined, strict=True)
    ordered = [translations[index] for index in range(len(texts))]
    return await asyncio.to_thread(lambda: JSONResponse(_content(body, ordered, detected)))


@router.api_route("/languages", methods=["GET"])
async def languages(request: Request) -> list[dict[str, Any]]:
    """The languages that can be translated, and those that each can be translated into.

    One that is only translated into has no `targets`; clients look for both of a pair in the list.
    """
    registry = registry_of(request)
    registry.check_loaded()
    targets: dict[str, list[str]] = {}
    for served in translators_of(registry):
        for source in sources_of(served.model):
            own = targets_of(served.model)
            targets.setdefault(source, []).extend(own)
            targets |= {code: targets.get(code, []) for code in own}
    return [
        {"code": code, "name": name_of(code), "targets": list(dict.fromkeys(targets[code]))}
        for code in sorted(targets)
    ]


@router.get("/frontend/settings")
async def frontend_settings(request: Request) -> dict[str, Any]:
    """The settings that LibreTranslate's clients read before they show a form; needs no key."""
    registry = registry_of(request)
    targets = [code for served in translators_of(registry) for code in targets_of(served.model)]
    target = targets[0] if targets else ""
    has_keys = bool(request.app.state.guard.keys)
    return {
        "charLimit": MAX_TEXT,
        "maxBody": registry.settings.max_body,
        "frontendTimeout": 500,  # milliseconds without a key press, LibreTranslate's default
        "apiKeys": has_keys,
        "keyRequired": has_keys,
        "suggestions": False,
        "filesTranslation": extras.missing_packages("documents") is None,
        "supportedFilesFormat": list(FORMATS),
        "language": {
            "source": {"code": "auto", "name": "Auto Detect"},
            "target": {"code": target, "name": name_of(target)},
        },
    }


@router.get("/spec")
async def specification(request: Request) -> dict[str, Any]:
    """The description of all routes, as at `/openapi.json`."""
    content: dict[str, Any] = request.app.openapi()
    return content


@router.post("/detect")
async def detect_language(body: DetectBody, request: Request) -> list[dict[str, Any]]:
    """The languages of a text among those of the server's translators; confidence is in percent."""
    registry = registry_of(request)
    registry.check_loaded()
    translators = translators_of(registry)
    if not translators:
        raise HttpError(404, "this server has no translator, and so no languages")
    known = {source for served in translators for source in sources_of(served.model)}
    if not known:
        raise HttpError(404, "the server's translators do not name their source languages")
    languages = await asyncio.to_thread(detect, body.q, known)
    return [confidence(code, probability) for code, probability in languages]


async def _groups(request: Request, body: TranslateBody) -> tuple[Texts, Groups, Any]:
    """The texts of a request, those of each translator, with room for them, and their languages.

    The translators stay open until the request ends.

    Raises:
        HttpError: no translator fits; no room.
    """
    registry, given = registry_of(request), as_list(body.q)
    is_given = body.source not in (None, "auto")
    first = translator_for(registry, body.source if is_given else None, body)
    hold = info_of(request.scope).resources.enter_context
    hold(first.held())
    texts = await _split(request, first, given, body)
    known = known_sources(registry, body)
    if is_given or (body.source is None and not known):
        return texts, {(first, None): [*range(len(texts))]}, None
    if not known:
        raise HttpError(
            400,
            "source auto needs a translator that names its source language: name the source, or "
            "leave it out",
            parameter="source",
        )
    detected = await detected_languages([" ".join(text.rows) for text in texts], known)
    groups: Groups = {}
    for index, entry in enumerate(detected):
        language = entry["language"]
        served = translator_for(registry, language, body)
        source = language if served.model.metadata.language_codes else None
        if (served, source) not in groups:  # it may be replaced while texts are split for another
            hold(served.held())
        groups.setdefault((served, source), []).append(index)
    for (served, _), indices in groups.items():
        if served is not first:
            own = await _split(request, served, [given[index] for index in indices], body)
            for index, text in zip(indices, own, strict=True):
                texts[index] = text
    return texts, groups, detected


async def _split(
    request: Request, served: ServedModel, texts: Sequence[str], body: TranslateBody
) -> Texts:
    """Texts in parts that a translator reads, with room for them until the request ends.

    Room is taken before the split, which is slow: a request that is refused is not split.
    """
    languages = None if body.source == "auto" else body.source, body.target
    fits, keeps = fits_model(served.model), served.model.metadata.keep is not None
    with served.slots(len(texts), "q"):
        split = await served.on_tokenizer_thread(
            lambda: [
                parts_of(text, body.format, languages, fits, keeps_words=keeps) for text in texts
            ]
        )
    reserve(request, served, sum(len(text.rows) for text in split), "q")
    return split


def _all_joined(
    texts: Sequence[Parts | HtmlParts],
    results: Sequence[Result],
    known: TagAlignments,
    language: str | None,
) -> list[list[Translation]]:
    """`_joined` for each text; `results` are those of all rows."""
    remaining, review = iter(results), language_review(language)
    return [_joined(text, remaining, known, review) for text in texts]


def _joined(
    text: Parts | HtmlParts, results: Iterator[Result], known: TagAlignments, review: Review
) -> list[Translation]:
    """The translations of a text, best first, from the next results, those of its rows."""
    found = [next(results) for _ in text.rows]
    if not found:
        return [Translation(text.joined([]).text, math.nan, _joined_alignment([]))]
    of_rows = [_translations(*result) for result in found]
    joined = [
        text.joined(
            [hypothesis.text for hypothesis in hypotheses],
            {
                row: known.get((row, hypothesis.text))
                for row, hypothesis in zip(text.rows, hypotheses, strict=True)
            },
        )
        for hypotheses in zip(*of_rows, strict=False)
    ]
    best, *others = [
        Translation(
            placed.text,
            fmean(hypothesis.score for hypothesis in hypotheses),
            _joined_alignment([hypothesis.alignment for hypothesis in hypotheses]),
        )
        for placed, hypotheses in zip(joined, zip(*of_rows, strict=False), strict=True)
    ]
    outputs = [hypotheses[0] for hypotheses, _ in found]
    reasons = [
        reason
        for row, output in zip(text.rows, outputs, strict=True)
        for reason in review_reasons(row, output)
    ]
    reasons += [Reason("cut")] if any(output.is_cut for output in outputs) else []
    reasons += [*too_long_words(text.num_unfit), *joined[0].reasons]
    reasons += review(Segment(" ".join(text.rows), 1), best.text)
    value = worst_quality(text.rows, outputs, has_reasons=bool(reasons))
    return [best._replace(reasons=[*dict.fromkeys(reasons)], quality=value), *others]


def _translations(outputs: Sequence[Generation], aligned: Sequence[Alignment]) -> list[Translation]:
    """The hypotheses of a row; without `aligned` their alignments are empty."""
    alignments = aligned or [_joined_alignment([])] * len(outputs)
    return [
        Translation(output.text, output.score, alignment)
        for output, alignment in zip(outputs, alignments, strict=True)
    ]


def _joined_alignment(parts: Sequence[Alignment]) -> Alignment:
    """The alignment of several lines, whose words are counted through."""
    joined: Alignment = {"source": [], "target": [], "links": []}
    for part in parts:
        first_source, first_target = len(joined["source"]), len(joined["target"])
        joined["source"] += part["source"]
        joined["target"] += part["target"]
        joined["links"] += [(first_source + s, first_target + t) for s, t in part["links"]]
    return joined


def _content(
    body: TranslateBody, translations: list[list[Translation]], detected: Any
) -> dict[str, Any]:
    """The answer: of a list of texts each value is a list."""
    columns: dict[str, list[Any]] = {
        "translatedText": [best.text for best, *_ in translations],
        "reasons": [best.reasons for best, *_ in translations],
        "reasonCodes": [[*map(code_of, best.reasons)] for best, *_ in translations],
    }
    if body.quality:
        columns["quality"] = [_finite(best.quality) for best, *_ in translations]
    if body.alternatives:
        columns["alternatives"] = [[one.text for one in others] for _, *others in translations]
    if body.scores:
        columns["scores"] = [[_finite(one.score) for one in all_] for all_ in translations]
    if body.alignments is not None:
        columns["alignments"] = [[one.alignment for one in all_] for all_ in translations]
    if detected is not None:
        columns["detectedLanguage"] = detected
    is_single = isinstance(body.q, str)
    return {name: values[0] if is_single else values for name, values in columns.items()}


async def translation_job(
    served: ServedModel, lines: list[str], body: TranslateBody
) -> tuple[Job, int]:
    """The work of a request, and the number of its source tokens."""
    model: Translator = served.model
    unit = body.alignments
    count = 1 + body.alternatives
    options: dict[str, Any] = {"scores": body.scores or body.quality, "num_return": count}
    if body.alternatives:
        default = model.metadata.options.get("beam_size", model.default_options["beam_size"])
        options["beam_size"] = max(default, count)
    languages = language_options(model, body)
    options |= options_for_ids(model, languages)

    def encode() -> list[list[int]]:
        """The ids of the sources."""
        return model.prompt_ids(lines, Options.from_keywords(languages))

    rows = await encoded(served, encode, "q")
    glossary = served.glossaries and served.glossaries.of(body.source, body.target)

    def resolve() -> Options:
        """The options of the search; which terms are left out is in the reasons of the answer."""
        own = body.glossary
        terms = glossary if own is None else glossary_for(model, {**languages, "glossary": own})
        if terms is not None:
            options["glossary"] = terms
        return model.options(**{**options, **languages})

    try:
        resolved = await asyncio.to_thread(resolve)
    except UserError as error:
        raise as_http_error(error, "glossary") from None

    def run(items: list[tuple[list[int], str]], report: OnOutput) -> list[Result]:
        """The hypotheses of each row of ids with its line, and their alignments if wanted."""
        rows, texts = [row for row, _ in items], [text for _, text in items]
        settled: dict[int, list[Generation]] = {}

        def report_unaligned(row: int, generations: list[Generation]) -> None:
            """Report the hypotheses of a row without alignments, if there is no further search."""
            [kept] = model.kept([texts[row]], [generations], resolved, at_once=True)
            if kept is not None:
                settled[row] = kept
                report(row, (kept, []))

        more: dict[str, Any] = {"on_output": report_unaligned} if unit is None else {}
        outputs = list(model.iterate_generations([rows], **options, **more))
        left = [row for row in range(len(rows)) if row not in settled]
        kept = model.kept([texts[row] for row in left], [outputs[row] for row in left], resolved)
        settled.update(zip(left, kept, strict=True))
        found = [settled[row] for row in range(len(rows))]
        aligned = (
            [[] for _ in rows] if unit is None else _alignments(model, texts, found, resolved, unit)
        )
        return list(zip(found, aligned, strict=True))

    sizes = list(map(len, rows))
    key = _batch_key(model, unit, options, languages)
    items = list(zip(rows, lines, strict=True))
    return Job(key, items, sizes, run, rows_each=resolved.rows), sum(sizes)


def _batch_key(
    model: Translator, unit: Any, options: dict[str, Any], languages: dict[str, Any]
) -> Hashable:
    """`Job.key` of sources.

    For alignments and further searches the texts of a batch are read again, in the languages of its
    first request.
    """
    reads_again = unit is not None or "glossary" in options or model.metadata.keep is not None
    named = languages if reads_again else {}
    return "translate", unit, tuple(sorted({**options, **named}.items()))


def _alignments(
    model: Translator,
    lines: Sequence[str],
    outputs: Sequence[list[Generation]],
    options: Options,
    unit: Any,
) -> list[list[Alignment]]:
    """The alignment of each output of each line, computed by the net for any backend."""
    from heedful.insight.alignment import align_outputs

    pairs = [
        (line, output)
        for line, generations in zip(lines, outputs, strict=True)
        for output in generations
    ]
    entries: list[Alignment] = []
    for first in range(0, len(pairs), _ALIGNED):
        texts, found = zip(*pairs[first : first + _ALIGNED], strict=True)
        entries += [
            {
                "source": alignment.source,
                "target": alignment.target,
                "links": sorted(alignment.links, key=lambda link: (link[1], link[0])),
            }
            for alignment in align_outputs(model, texts, found, options, unit=unit)
        ]
    remaining = iter(entries)
    return [list(itertools.islice(remaining, len(generations))) for generations in outputs]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
