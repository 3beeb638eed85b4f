"""Routes of encoder-only models: classes of texts, and tokens for masks."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from heedful.data.labels import ProblemType
from heedful.pipelines import Classification, Classifier, MaskedLanguageModel
from heedful.serve.batches import Job
from heedful.serve.bodies import ClassifyBody, FillBody
from heedful.serve.errors import HttpError
from heedful.serve.guard import info_of
from heedful.serve.requests import as_list, encoded, registry_of, reserve

router = APIRouter(tags=["Encoders"])


@router.post("/classify")
async def classify(body: ClassifyBody, request: Request) -> Response:
    """The class of a text, or of each text of a list, with the probability of every class.

    A multi-label classifier also has `labels`, those of a probability of 0.5 or more; a regression
    has `values` alone.
    """
    served = registry_of(request).get(body.model, [Classifier], "/classify needs a classifier")
    is_single = isinstance(body.texts, str)
    if body.pairs is not None and isinstance(body.pairs, str) != is_single:
        message = "pairs must be a text for a text, and a list for a list"
        raise HttpError(400, message, parameter="pairs")
    texts = as_list(body.texts)
    others = None if body.pairs is None else as_list(body.pairs)
    reserve(request, served, len(texts), "texts")
    model: Classifier = served.model
    rows, types = await encoded(served, lambda: model.encode_pairs(texts, others, "error"), "texts")

    def run(items: list[tuple[list[int], list[int] | None]], report: object) -> list[Any]:
        """The classes of texts, ids and token types."""
        return model.classify_rows([ids for ids, _ in items], [kinds for _, kinds in items])

    of_rows: Sequence[list[int] | None] = types or [None] * len(rows)
    items = list(zip(rows, of_rows, strict=True))
    sizes = list(map(len, rows))
    results = await served.run(Job(("classify", types is None), items, sizes, run))
    info_of(request.scope).num_prompt = sum(sizes)
    answers = [_answer(result, model.metadata.problem) for result in results]
    return JSONResponse({"model": served.name, "results": answers[0] if is_single else answers})


def _answer(result: Classification, problem: ProblemType) -> dict[str, Any]:
    """The classification as JSON, which has no NaN and no infinity."""
    scores = {label: value for label, value in result.scores.items() if math.isfinite(value)}
    if problem == "regression":
        return {"values": scores}
    labels = {"labels": result.labels} if problem == "multi_label" else {}
    answer = {"label": result.label, "probability": result.probability}
    return answer | labels | {"probabilities": scores}


@router.post("/fill")
async def fill(body: FillBody, request: Request) -> Response:
    """The most probable tokens for each mask of a text, or of each text of a list.

    Masks are written `<mask>` or `[MASK]`.
    """
    use = "/fill needs a masked language model"
    served = registry_of(request).get(body.model, [MaskedLanguageModel], use)
    is_single = isinstance(body.texts, str)
    texts = as_list(body.texts)
    reserve(request, served, len(texts), "texts")
    model: MaskedLanguageModel = served.model
    rows = await encoded(served, lambda: model.masked_rows(body.texts), "texts")
    sizes = list(map(len, rows))
    top_k = body.top_k
    job = Job(("fill", top_k), rows, sizes, lambda rows, report: model.fill_rows(rows, top_k))
    results = await served.run(job)
    info_of(request.scope).num_prompt = sum(sizes)

    def answer() -> Response:
        """All fillings, each with the whole text."""
        answers = [
            [[asdict(filling) for filling in fillings] for fillings in masks] for masks in results
        ]
        return JSONResponse({"model": served.name, "results": answers[0] if is_single else answers})

    return await served.on_tokenizer_thread(answer)
