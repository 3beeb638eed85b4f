"""Which of a server's translators translates a request, by its languages."""

import asyncio
from collections.abc import Sequence
from typing import Any

from heedful.data.language_tags import matching_tag
from heedful.errors import format_names
from heedful.pipelines import Translator
from heedful.serve.bodies import TranslateBody
from heedful.serve.errors import HttpError
from heedful.serve.languages import detect, sources_of, targets_of
from heedful.serve.models import Registry, ServedModel


def known_sources(registry: Registry, body: TranslateBody) -> set[str]:
    """The languages that can be translated into the target."""
    named, target = translators_of(registry, body.model), body.target
    fitting = [served for served in named if _is_one_of(target, targets_of(served.model))]
    sources = {source for served in fitting for source in sources_of(served.model)}
    return {source for source in sources if target is None or not matching_tag(target, [source])}


async def detected_languages(texts: Sequence[str], known: set[str]) -> list[dict[str, Any]]:
    """The most probable language of each text among those that can be translated."""
    found = await asyncio.to_thread(lambda: [detect(text, known)[0] for text in texts])
    return [confidence(*language) for language in found]


def translators_of(registry: Registry, name: str | None = None) -> list[ServedModel]:
    """All translators, or the one of a name; raises HttpError if no translator has it."""
    if name is not None:
        return [registry.get(name, [Translator], "/translate needs a translator")]
    return [served for served in registry.models.values() if isinstance(served.model, Translator)]


def translator_for(registry: Registry, source: str | None, body: TranslateBody) -> ServedModel:
    """The named translator, or the first from a language (None: any) into the target.

    One that names its languages goes before one without languages, which fits every direction.

    Raises:
        HttpError: no translator fits.
    """
    registry.check_loaded()
    translators, target = translators_of(registry, body.model), body.target
    if not translators:
        raise HttpError(404, "/translate needs a translator, and this server has none")
    fitting = [
        served
        for served in translators
        if (source is None or _is_one_of(source, sources_of(served.model) or [source]))
        and (not (targets := targets_of(served.model)) or _is_one_of(target, targets))
    ]
    if fitting:
        named = [(sources_of(one.model), targets_of(one.model)) for one in fitting]
        return fitting[max(range(len(named)), key=lambda index: sum(map(bool, named[index])))]
    if not target:
        message = "Invalid request: missing target parameter"
        values = {"name": "target"}
        raise HttpError(400, message, code="invalid_parameter", values=values, parameter="target")
    pairs = [
        f"{format_names(sources_of(one.model), str) or 'any'} to "
        f"{format_names(targets_of(one.model), str) or 'any'}"
        for one in translators
    ]
    direction = f"into {target}" if source is None else f"from {source} into {target}"
    listed = "; ".join(pairs)
    sides = [sources_of(one.model) + targets_of(one.model) for one in translators]
    known = [code for codes in sides for code in codes]
    codes = [code for code in (source, target) if code]
    unknown = next((code for code in codes if not _is_one_of(code, [*dict.fromkeys(known)])), None)
    message = f"no translator {direction}; {body.model or 'this server'} has {listed}"
    if unknown is not None and body.model is None:
        message = f"{unknown} is not supported"  # as LibreTranslate says it
    raise HttpError(400, message, code="no_translator", values={"pairs": listed})


def _is_one_of(language: str | None, tags: Sequence[str]) -> bool:
    """True if a language is one of some tags, in whichever form they are written."""
    return language is not None and matching_tag(language, tags) is not None


def confidence(code: str, probability: float) -> dict[str, Any]:
    """A language as `/detect` names it, with its probability in percent."""
    return {"language": code, "confidence": round(100 * probability, 1)}
