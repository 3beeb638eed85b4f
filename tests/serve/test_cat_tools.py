"""Requests of tools for translators, as their sources send them (docs/guides/cat-tools.md)."""

import json
from pathlib import Path
from typing import Any
from urllib import error, parse, request

import pytest

from running_server import running

WEBLATE = {"Referer": "https://weblate.example/", "Accept": "application/json; charset=utf-8"}


def answer_to(sent: request.Request) -> tuple[int, Any]:
    """The status and the content of an answer."""
    try:
        with request.urlopen(sent, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def weblate(server: Any, texts: list[str], **fields: str) -> tuple[int, Any]:
    """Its batch of texts: `weblate/machinery/libretranslate.py`, Weblate 5."""
    content = {"api_key": "", "q": texts, "source": "de", "target": "en", **fields}
    headers = {**WEBLATE, "Content-Type": "application/json"}
    return answer_to(
        request.Request(f"{server.url}/translate", json.dumps(content).encode(), headers)
    )


def test_weblate(served: Any, tmp_path: Path) -> None:
    status, languages = answer_to(request.Request(f"{served.url}/languages", headers=WEBLATE))
    assert status == 200
    # It asks for no pair of languages of which one is missing here.
    assert {"de", "en"} <= {entry["code"] for entry in languages}
    # A placeholder is [X, its place in the text, and X].
    texts = ["the cat", "a dog [X6X] ran"]
    model = served.models["de-en"]
    status, answer = weblate(served, texts)
    assert (status, answer["translatedText"]) == (200, model.translate(texts))
    lacks = "not read, as the model's vocabulary lacks it: [, X, 6, ]"
    cut = "cut off by the length limit"
    assert answer["reasons"] == [[cut], [lacks, "missing: [X6X]", cut]]
    assert weblate(served, texts[:1])[1]["translatedText"] == model.translate(texts[:1])
    # Its check of new settings; it shows `error` if that is a text.
    status, refused = weblate(served, ["test"], source="en", target="de")
    assert (status, refused["error"]) == (
        400,
        "no translator from en into de; this server has de to en",
    )
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-user\n")
    with running({"de-en": model}, keys) as server:
        assert weblate(server, texts, api_key="a-key-of-a-user")[1] == answer
        assert weblate(server, texts)[0] == 401
        # It asks for the languages without its key.
        sent = request.Request(f"{server.url}/languages", headers=WEBLATE)
        assert answer_to(sent)[0] == 200


@pytest.mark.parametrize("text", ["the cat", "a <t0>dog</t0> ran <x1/>", "50 % & más = +"])
def test_omegat(served: Any, text: str) -> None:
    """Of its plugin for LibreTranslate: a form, its fields in this order."""
    fields = [("q", text), ("source", "de"), ("target", "en")]
    body = parse.urlencode(fields, quote_via=parse.quote_plus).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": len(body)}
    status, answer = answer_to(request.Request(f"{served.url}/translate", body, headers))
    assert (status, answer["translatedText"]) == (200, served.models["de-en"].translate(text))
