"""LibreTranslate's routes, by the calls of libretranslatepy and as JSON; classes and masks."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib import error, parse, request

import pytest

from backend_models import model_of
from running_server import wait_for_free_slots


def call(served: Any, path: str, body: Any = None, form: bool = False, method: str = "") -> Any:
    """An answer and its status; forms as libretranslatepy sends them."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if form:
        data, headers = parse.urlencode(body).encode(), {}
    sent = request.Request(served.url + path, data, headers, method=method or None)
    try:
        with request.urlopen(sent, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


CUT = "cut off by the length limit"


def answer_of(model: Any, text: str) -> dict[str, Any]:
    """The answer to a text whose translation has no other reason for a review than its length."""
    [output] = model.translate(text, return_details=True)
    codes = [{"code": "cut", "values": {}}] * output.is_cut
    return {"translatedText": output.text, "reasons": [CUT] * len(codes), "reasonCodes": codes}


def test_the_calls_of_libretranslatepy(served: Any) -> None:
    model = served.models["de-en"]
    form = {"q": "the cat sat", "source": "de", "target": "en"}
    assert call(served, "/translate", form, form=True) == (
        200,
        answer_of(model, "the cat sat"),
    )
    assert call(served, "/languages", {}, form=True, method="GET") == (
        200,
        [
            {"code": "de", "name": "German", "targets": ["en"]},
            {"code": "en", "name": "English", "targets": []},
        ],
    )
    status, found = call(served, "/detect", {"q": "Das ist ein langer deutscher Satz"}, form=True)
    assert status == 200
    assert found[0]["language"] == "de"
    assert found[0]["confidence"] > 50
    status, found = call(served, "/detect", {"q": "This is an English sentence"}, form=True)
    assert found[0]["confidence"] < 50


def test_a_request_has_terms_of_its_own(
    served: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from heedful.serve.glossaries import Glossaries

    body = {"q": ["the cat", "a dog"], "source": "de", "target": "en"}
    model = served.models["de-en"]
    plain = call(served, "/translate", body)[1]
    assert plain["reasons"] == [answer_of(model, text)["reasons"] for text in body["q"]]
    status, answer = call(served, "/translate", {**body, "glossary": {"cat": "mat|sat"}})
    assert status == 200
    is_met = {"mat", "sat"} & {*answer["translatedText"][0].split()}
    assert is_met or "the term cat" in answer["reasons"][0][0]
    assert answer["translatedText"][1] == plain["translatedText"][1]
    terms = {**body, "glossary": {"cat": "mat|sat"}, "alignments": "words"}
    [own], _ = call(served, "/translate", terms)[1]["alignments"]
    assert own["target"] == answer["translatedText"][0].split()  # not of the first search
    unknown = {"cat": "mat|sat", "dog": "漢"}  # which the vocabulary cannot write
    status, left_out = call(served, "/translate", {**body, "glossary": unknown})
    assert (status, left_out["translatedText"]) == (200, answer["translatedText"])
    term = "the term dog is not required: the model cannot write 漢"
    assert left_out["reasons"][1] == [term, *plain["reasons"][1]]
    assert left_out["reasonCodes"][1][0]["code"] == "term_left_out"
    assert call(served, "/translate", {**body, "glossary": {"dog": "漢"}})[0] == 400
    status, answer = call(served, "/translate", {**body, "glossary": {"cat": ""}})
    assert status == 400
    assert "line 1: the translation '' is empty" in answer["error"]
    assert call(served, "/translate", {**body, "glossary": "x"})[0] == 400
    many = {**body, "glossary": {f"a{number}": "b" for number in range(1_001)}}
    assert "at most 1000 items" in call(served, "/translate", many)[1]["error"]
    form = {**body, "q": "the cat", "glossary": '{"cat": "mat|sat"}'}
    single = {**form, "glossary": {"cat": "mat|sat"}}
    assert call(served, "/translate", form, form=True) == call(served, "/translate", single)
    for broken in ("x", "[]", '{"cat": 1}', "[" * 9_999):
        assert call(served, "/translate", {**form, "glossary": broken}, form=True)[0] == 400
    path = tmp_path / "terms.tsv"  # of the server, in place of which none is given
    path.write_text("cat\tmat|sat\ndog\t漢\n")
    own = Glossaries("de-en", served.models["de-en"], path)
    assert [record.name for record in caplog.records if "1 term is left out" in record.message] == [
        "heedful.serve"
    ]
    monkeypatch.setattr(served.server.registry.models["de-en"], "glossaries", own)
    assert call(served, "/translate", body)[1] != plain
    assert call(served, "/translate", {**body, "glossary": {}})[1] == plain


def test_the_quality_is_that_of_the_worst_sentence(served: Any) -> None:
    from heedful.fidelity.quality import quality

    model = served.models["de-en"]
    texts = ["The cat sat. A dog ran!", "A dog ran! The cat sat.", "", "the dog"]
    body = {"q": texts, "source": "de", "target": "en", "quality": True}
    status, answer = call(served, "/translate", body)
    assert (status, "scores" in answer) == (200, False)
    outputs = model.translate(
        ["The cat sat.", "A dog ran!", "the dog"], return_details=True, scores=True
    )
    values = [
        quality(found.probability, has_reasons=bool(found.reasons) or found.is_cut)
        for [found] in outputs
    ]
    assert values[0] != pytest.approx(values[1])
    worst = pytest.approx(min(values[:2]))
    assert answer["quality"] == [worst, worst, None, pytest.approx(values[2])]


def test_the_pair_of_a_request_chooses_terms_of_tbx(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model into several languages did not start: its target language was not known."""
    from heedful.errors import UserError
    from heedful.serve.glossaries import Glossaries

    path = tmp_path / "terms.tbx"
    entry = "<termEntry>{}</termEntry>".format(
        "".join(
            f'<langSet xml:lang="{tag}"><tig><term>{term}</term></tig></langSet>'
            for tag, term in (("de", "Katze"), ("en-GB", "cat"), ("nb", "mat"), ("nn", "sat"))
        )
    )
    path.write_text(f"<martif><text><body>{entry}</body></text></martif>")
    model = model_of("vaswani2017")
    plain = model.metadata
    model.metadata = replace(plain, src_language="de", language_tags={"en": "<a>", "no": "<b>"})
    several = Glossaries("m", model, path)
    assert [several.of("de", tag).terms[0].targets for tag in ("eng", "nb")] == [  # type: ignore[union-attr]
        ("cat",),
        ("mat",),
    ]
    assert several.of(None, "en") is several.of("de", "en")
    model.metadata = replace(plain, src_language="fr", tgt_language="en")
    assert Glossaries("m", model, path).of("fr", "en") is None
    assert "has no term from and into languages of m" in caplog.text
    model.metadata = plain
    with pytest.raises(UserError, match="and m does not name its languages; set"):
        Glossaries("m", model, path)
    path.write_text("cat\tmat\n")
    assert Glossaries("m", model, path).of(None, None) is not None


def test_the_client_libretranslatepy(served: Any, tmp_path: Path) -> None:
    """Its whole interface, with a key of the server in the bodies."""
    client = pytest.importorskip(
        "libretranslatepy", reason="libretranslatepy is not installed"
    ).LibreTranslateAPI
    from running_server import running

    keys, model = tmp_path / "keys", served.models["de-en"]
    keys.write_text("a-key-of-a-user\n")
    with running({"de-en": model}, keys) as server:
        opened = client(server.url, api_key="a-key-of-a-user")
        for text in ("the cat sat", "", "ein Hund & eine Katze = 2%"):
            assert opened.translate(text, "de", "en") == model.translate(text)
        assert opened.translate("a dog", "auto", "en") == model.translate("a dog")
        assert opened.detect("Das ist ein langer deutscher Satz")[0]["language"] == "de"
        # Its request for the languages is a GET with a body, which has the key.
        assert [entry["code"] for entry in opened.languages()] == ["de", "en"]
        for refused, status in ((opened, 400), (client(server.url, api_key="x"), 401)):
            with pytest.raises(error.HTTPError) as raised:
                refused.translate("a", "fr", "en")
            assert raised.value.code == status


def test_lines_are_translated_one_by_one(served: Any) -> None:
    """A tokenizer takes a line break for a space; blank lines are kept."""
    model = served.models["de-en"]
    lines = ["the cat sat", "", "a dog ran home ", "  "]
    body = {
        "q": ["\r\n".join(lines), "\n", "the cat"],
        "source": "de",
        "target": "en",
        "alternatives": 1,
        "scores": True,
        "alignments": "words",
    }
    status, answer = call(served, "/translate", body)
    assert status == 200
    single = [call(served, "/translate", {**body, "q": lines[n]})[1] for n in (0, 2)]
    first, second = (one["translatedText"] for one in single)
    assert first == model.translate(lines[0], beam_size=2)
    other = call(served, "/translate", {**body, "q": "the cat"})[1]
    assert answer["translatedText"] == [
        f"{first}\n\n{second}\n  ",
        "\n",
        other["translatedText"],
    ]
    first, second = (one["alternatives"][0] for one in single)
    assert answer["alternatives"][0] == [f"{first}\n\n{second}\n  "]
    means = [sum(pair) / 2 for pair in zip(*(one["scores"] for one in single), strict=True)]
    assert answer["scores"] == [pytest.approx(means, abs=1e-4), [None], other["scores"]]
    best, *_ = answer["alignments"][0]
    parts = [one["alignments"][0] for one in single]
    for side in ("source", "target"):
        assert best[side] == parts[0][side] + parts[1][side]
    offsets = [len(parts[0][side]) for side in ("source", "target")]
    later = [[s + offsets[0], t + offsets[1]] for s, t in parts[1]["links"]]
    assert best["links"] == parts[0]["links"] + later
    assert answer["alignments"][1] == [{"source": [], "target": [], "links": []}]


def test_sentences_of_a_line_are_translated_one_by_one(served: Any) -> None:
    model = served.models["de-en"]
    body = {"q": "The cat sat.  A dog ran!\nMr. Smith ran", "source": "de", "target": "en"}
    sentences = ["The cat sat.", "A dog ran!", "Mr. Smith ran"]
    first, second, third = (text.strip() for text in model.translate(sentences))
    status, answer = call(served, "/translate", body)
    assert (status, answer["translatedText"]) == (200, f"{first}  {second}\n{third}")
    html = {**body, "q": "<p>The cat sat. <b>A dog ran!</b></p>", "format": "html"}
    _, answer = call(served, "/translate", html)
    assert answer["translatedText"] == f"<p>{first} <b>{second}</b></p>"


def test_a_sentence_that_is_too_long_is_translated_in_clauses(served: Any) -> None:
    """As by `heedful translate`; other lines, blanks and the order stay, and no word is lost."""
    from heedful.documents.sentences import SplitText
    from heedful.documents.translating import fits_model

    model = served.models["de-en"]
    fits = fits_model(model)
    long = ", ".join(["the cat sat on the mat and the dog ran home"] * 8)
    assert not fits(long)
    split = SplitText(long, fits, "de")
    expected = split.joined(model.translate(split.rows), "de", "en")
    short = model.translate("a dog ran")
    body = {"q": f"a dog ran\n\n {long}\na dog ran", "source": "de", "target": "en"}
    for source in ("de", "auto"):
        status, answer = call(served, "/translate", {**body, "source": source, "scores": True})
        assert status == 200, answer
        assert answer["translatedText"] == f"{short}\n\n {expected}\n{short}"
    _, answer = call(served, "/translate", {**body, "q": f"<p>{long}</p>", "format": "html"})
    assert answer["translatedText"] == f"<p>{escape(expected, quote=False)}</p>"

    word = "dog" * 200
    status, answer = call(served, "/translate", {**body, "q": f"a dog ran\n{word}"})
    assert (status, answer["translatedText"]) == (200, f"{short}\n{word}")
    of_dog = answer_of(model, "a dog ran")["reasons"]
    assert answer["reasons"] == [*of_dog, "words that are too long for the model: 1"]
    status, answer = call(served, "/translate", {**body, "q": word})
    assert (status, answer["code"]) == (400, "context_length_exceeded")


def test_reasons_to_review_a_translation(served: Any) -> None:
    body = {"q": ["the cat 52. A dog!", "", "a dog"], "source": "de", "target": "en"}
    _, answer = call(served, "/translate", body)
    lacks = "not read, as the model's vocabulary lacks it: "
    expected = [f"{lacks}5, 2, .", "missing: 52", f"{lacks}A, !", CUT]
    assert answer["reasons"] == [expected, [], [CUT]]
    codes = [("unknown", "5, 2, ."), ("missing", "52"), ("unknown", "A, !")]
    expected = [{"code": code, "values": {"pieces": pieces}} for code, pieces in codes]
    cut = {"code": "cut", "values": {}}
    assert answer["reasonCodes"] == [[*expected, cut], [], [cut]]
    html = {**body, "q": "<p id=52>the cat &eacute;</p>", "format": "html"}
    reasons = call(served, "/translate", html)[1]["reasons"]
    assert reasons == [f"{lacks}é", CUT], "tags are not of the text"


def test_a_list_is_one_batch(served: Any) -> None:
    model, texts = served.models["de-en"], ["the cat", "", "a dog ran home", "the cat"]
    engine = served.server.registry.models["de-en"].engine
    sizes, observe = [], engine.observe
    engine.observe = lambda rows, tokens: sizes.append(rows)
    try:
        body = {"q": texts, "source": "auto", "target": "en"}
        status, answer = call(served, "/translate", body)
    finally:
        engine.observe = observe
    assert (status, sizes) == (200, [4])
    assert answer["translatedText"] == [model.translate(text) for text in texts]
    assert [entry["language"] for entry in answer["detectedLanguage"]] == ["de"] * 4


def test_a_batch_is_as_large_as_the_servers_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model divided it by the number that was measured for it, or by 8,192."""
    from heedful.backends.base import Settings
    from heedful.backends.torch.eager import Eager
    from running_server import running

    model, sizes, outputs = model_of("vaswani2017"), [], Eager.outputs

    def noted(eager: Any, rows: Any, request: Any) -> Any:
        sizes.append(len(rows))
        return outputs(eager, rows, request)

    monkeypatch.setattr(Eager, "outputs", noted)
    model.settings = Settings(batch_tokens=30)
    body = {"q": ["the cat", "a dog ran", "cats"], "source": "de", "target": "en"}
    with running({"m": model}, batch_tokens=300) as server:
        assert call(server, "/translate", body)[0] == 200
    assert sizes == [3]


def test_a_translator_that_names_its_languages_goes_first(served: Any) -> None:
    """Others fit every direction, but only those directions that no translator names."""
    from backend_models import model_of
    from running_server import running

    models = {"any": model_of("t5"), "de-en": served.models["de-en"]}
    with running(models) as server:
        for source, target, name in (
            ("de", "en", "de-en"),
            ("fr", "en", "any"),
            ("de", "fr", "any"),
        ):
            body = {"q": "a dog", "source": source, "target": target}
            expected = answer_of(models[name], "a dog")
            assert call(server, "/translate", body) == (200, expected)
        body = {"q": "a dog", "source": "de", "target": "en"}
        for name, model in models.items():
            answer = call(server, "/translate", {**body, "model": name})
            assert answer == (200, answer_of(model, "a dog"))
        status, refused = call(server, "/translate", {**body, "model": "de-en", "source": "fr"})
        assert (status, refused["error"]) == (
            400,
            "no translator from fr into en; de-en has de to en",
        )
        status, refused = call(server, "/translate", {**body, "model": "none"})
        assert (status, "no model 'none' here" in refused["error"]) == (404, True)


def test_each_text_of_a_list_has_its_own_language(served: Any) -> None:
    """And the translator from it."""
    from running_server import running

    german = served.models["de-en"]
    french = model_of("vaswani2017", activation="gelu")
    french.metadata = replace(french.metadata, src_language="fr", tgt_language="en")
    french.net.double()
    texts = [
        "Das ist ein langer deutscher Satz",
        "Ceci est une longue phrase en français",
        "Und noch ein deutscher Satz",
    ]
    with running({"de-en": german, "fr-en": french}) as server:
        for body in ({"source": "auto"}, {}):
            status, answer = call(server, "/translate", {"q": texts, "target": "en", **body})
            assert status == 200
            models = [german, french, german]
            expected = [model.translate(text) for model, text in zip(models, texts, strict=True)]
            assert answer["translatedText"] == expected
            languages = [entry["language"] for entry in answer["detectedLanguage"]]
            assert languages == ["de", "fr", "de"]
        wait_for_free_slots(server)
    assert expected[1] != german.translate(texts[1])


def test_a_translator_without_languages_needs_no_target(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from backend_models import saved
    from heedful.serve.metrics import Metrics
    from heedful.serve.models import Registry
    from heedful.serve.settings import Settings
    from running_server import running

    saved("vaswani2017", tmp_path / "model")
    caplog.set_level("WARNING", "heedful.serve")
    model, _ = Registry({"any": tmp_path / "model"}, Settings(), Metrics()).load("any")
    assert f'set "src_language" and "tgt_language" (such as "de" and "en") in {tmp_path}' in (
        caplog.text
    )
    config = tmp_path / "model" / "config.json"
    content = json.loads(config.read_text()) | {"src_language": "de", "tgt_language": "en"}
    config.write_text(json.dumps(content))
    caplog.clear()
    Registry({"any": tmp_path / "model"}, Settings(), Metrics()).load("any")
    assert not caplog.text
    with running({"any": model}) as server:
        expected = answer_of(model, "a dog")
        for body in ({}, {"target": "en"}, {"source": "de", "target": "en"}, {"source": "de"}):
            assert call(server, "/translate", {"q": "a dog", **body}) == (200, expected)
        status, answer = call(server, "/translate", {"q": "a dog", "source": "auto"})
        assert (status, "names its source language" in answer["error"]) == (400, True)


def test_text_nodes_of_html_are_translated(served: Any) -> None:
    model = served.models["de-en"]
    body = {"source": "de", "target": "en", "format": "html"}

    def translated(html: str, **more: Any) -> Any:
        status, answer = call(served, "/translate", {**body, "q": html, **more})
        assert status == 200, answer
        return answer["translatedText"]

    def own(text: str) -> str:
        return str(escape(model.translate(text), quote=False))

    head = "<!DOCTYPE html>\n<html><head><title>{}</title><style>p > b {{}}</style></head>"
    page = head + '<body class="a"><p id="x"><b>{}!</b><br>{}</p></body></html>'
    texts = ["the cat", "a dog", "the mat"]
    assert translated(page.format(*texts)) == page.format(
        own(texts[0]), "@", own(texts[2])
    ).replace("@!", own("a dog!"))
    # Texts beside tags in a line are one text for the model.
    for source, expected in (
        ("the\n   cat a dog", own("the cat a dog")),
        ("<pre>the cat\n\na dog</pre>", f"<pre>{own('the cat')}\n\n{own('a dog')}</pre>"),
        ("<!-- the --><script>a < b</script>", "<!-- the --><script>a < b</script>"),
        (
            '<p translate="no">the <b>cat</b> sat</p>a dog <i class="a notranslate">ran</i>',
            f'<p translate="no">the <b>cat</b> sat</p>{own("a dog")} '
            '<i class="a notranslate">ran</i>',
        ),
        ("the cat <code>a <i>dog</i></code>", f"{own('the cat')} <code>a <i>dog</i></code>"),
        ("a &lt;b&gt; cat", own("a <b> cat")),
        ('<a href="?a=1&amp;b">x</a>', f'<a href="?a=1&amp;b">{own("x")}</a>'),
        ("", ""),
        ("<br>", "<br>"),
        ("\x1b", "\x1b"),
        ("<p>\x1bthe cat</p>", f"<p>{own('the cat')}</p>"),
        ("<!doctype html>", "<!doctype html>"),
    ):  # fmt: skip
        assert translated(source) == expected
    found = translated("the cat <b>a dog</b>, <i>the <u>mat</u></i>!")
    assert re.sub(r"</?[biu]>", "", found) == own("the cat a dog, the mat!")
    assert sorted(re.findall("<.*?>", found)) == sorted(
        ["<b>", "</b>", "<i>", "</i>", "<u>", "</u>"]
    )
    whole = {**body, "q": ["<p>the cat</p>", "a <b>dog</b>"], "alternatives": 1, "scores": True}
    _, answer = call(served, "/translate", whole)
    [first, second] = model.generate(["the cat"], return_details=True, num_return=2, beam_size=5)[0]
    assert answer["translatedText"][0] == f"<p>{escape(first.text, quote=False)}</p>"
    assert answer["alternatives"][0] == [f"<p>{escape(second.text, quote=False)}</p>"]
    assert answer["scores"][0] == pytest.approx([first.score, second.score], abs=1e-4)


@pytest.mark.parametrize("path", ["/translate", "/translate_file"])
def test_a_model_that_is_replaced_while_texts_are_split_stays_open(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It was closed, as no text had room yet: the request failed."""
    from heedful.serve import documents, translating
    from heedful.serve.models import Registry
    from running_server import running

    model = model_of("vaswani2017")
    with running({"m": model}) as served:
        registry: Registry = served.server.registry
        former = registry.models["m"]
        parts_of, translate_document = translating.parts_of, documents.translate_document

        def after_replacement(function: Any) -> Any:
            def call_it(*arguments: Any, **options: Any) -> Any:
                done = threading.Event()
                served.loop.call_soon_threadsafe(lambda: (registry.add("m", model), done.set()))
                assert done.wait(10)
                return function(*arguments, **options)

            return call_it

        monkeypatch.setattr(translating, "parts_of", after_replacement(parts_of))
        monkeypatch.setattr(documents, "translate_document", after_replacement(translate_document))
        file = {"file": "dGhlIGNhdA==", "filename": "a.txt"}
        body = {"q": "the cat"} if path == "/translate" else file
        status, answer = call(served, path, body)
        assert status == 200, answer
        assert registry.models["m"] is not former
        former.worker.join(5)
        assert not former.worker.is_alive


def test_a_translator_that_is_replaced_while_another_splits_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several languages in a request: the later translators were held by nothing yet."""
    from heedful.serve import translating
    from running_server import running

    models, texts = {}, ["Das ist ein langer deutscher Satz"]
    texts += ["Ceci est une longue phrase en français", "Esta es una frase larga en español"]
    for code in ("de", "fr", "es"):
        models[code] = model_of("vaswani2017")
        models[code].metadata = replace(models[code].metadata, src_language=code, tgt_language="en")
    with running(models) as served:
        registry, parts_of = served.server.registry, translating.parts_of
        former, calls = registry.models["es"], []

        def replacing(text: str, *arguments: Any, **options: Any) -> Any:
            calls.append(text)
            if calls == [*texts, texts[1]]:  # again for its own translator
                done = threading.Event()
                served.loop.call_soon_threadsafe(
                    lambda: (registry.add("es", models["es"]), done.set())
                )
                assert done.wait(10)
            return parts_of(text, *arguments, **options)

        monkeypatch.setattr(translating, "parts_of", replacing)
        status, answer = call(served, "/translate", {"q": texts, "target": "en"})
        assert status == 200, answer
        assert calls == [*texts, *texts[1:]]
        assert registry.models["es"] is not former
        former.worker.join(5)
        assert not former.worker.is_alive


def test_the_other_routes_of_libretranslate(served: Any, tmp_path: Path) -> None:
    from running_server import running

    assert call(served, "/health") == (200, {"status": "ok"})
    status, settings = call(served, "/frontend/settings")
    assert (status, settings["keyRequired"]) == (200, False)
    assert settings["language"]["target"] == {"code": "en", "name": "English"}
    assert "/translate" in call(served, "/spec")[1]["paths"]
    for path in ("/health", "/spec", "/frontend/settings", "/languages"):
        assert call(served, path, {})[0] == 405
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-a-user\n")
    with running({"de-en": served.models["de-en"]}, keys) as server:
        assert call(server, "/frontend/settings")[1]["keyRequired"]
        assert call(server, "/health")[0] == 200
        assert call(server, "/spec")[0] == 401


def test_languages_may_be_written_in_any_form(served: Any) -> None:
    body = {"q": "a dog", "source": "de", "target": "en"}
    expected = call(served, "/translate", body)
    assert expected[0] == 200
    for source, target in (("deu", "en-US"), ("de_DE", "eng"), ("DE", "EN")):
        assert call(served, "/translate", body | {"source": source, "target": target}) == expected
    status, answer = call(served, "/translate", body | {"source": "tlh"})
    assert (status, answer["error"]) == (400, "tlh is not supported")


def test_alternatives_are_the_next_hypotheses(served: Any) -> None:
    model = served.models["de-en"]
    body = {"q": "a dog", "source": "de", "target": "en", "alternatives": 3}
    _, answer = call(served, "/translate", body)
    [outputs] = model.generate(["a dog"], return_details=True, num_return=4)
    assert [answer["translatedText"], *answer["alternatives"]] == [o.text for o in outputs]
    form = {name: str(value) for name, value in body.items()}
    assert call(served, "/translate", form, form=True) == (200, answer)


def test_scores_and_alignments_are_those_of_the_library(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every hypothesis, in one batch with texts of other lengths and a blank one; aligned in
    several passes."""
    from heedful.insight import alignments

    monkeypatch.setattr("heedful.serve.translating._ALIGNED", 4)
    model, texts = served.models["de-en"], ["a dog", "", "the cat sat on the mat", "a 😀 dog"]
    body = {"q": texts, "source": "de", "target": "en", "alternatives": 2, "scores": True}
    for unit in ("words", "tokens"):
        status, answer = call(served, "/translate", {**body, "alignments": unit})
        assert status == 200
        outputs = model.generate(texts, return_details=True, num_return=3, beam_size=5)
        for entries, scores, hypotheses, text in zip(
            answer["alignments"], answer["scores"], outputs, texts, strict=True
        ):
            assert scores == pytest.approx([output.score for output in hypotheses])
            for entry, output in zip(entries, hypotheses, strict=True):
                if not text:
                    assert entry == {"source": [], "target": [], "links": []}
                    continue
                expected = alignments(model, text, output.ids, unit=unit)
                assert (entry["source"], entry["target"]) == (
                    [*expected.source],
                    [*expected.target],
                )
                assert {tuple(link) for link in entry["links"]} == expected.links
    assert answer["alignments"][2][0]["links"]
    _, words = call(served, "/translate", body | {"alignments": "words"})
    assert words["alignments"][3][0]["source"] == ["a", "😀", "dog"]  # which no token has
    form = {"q": "a dog", "source": "de", "target": "en", "scores": "true", "alignments": "tokens"}
    _, single = call(served, "/translate", form, form=True)
    assert single["alignments"] == answer["alignments"][0][:1]
    assert single["scores"] == pytest.approx(answer["scores"][0][:1])


def test_requests_that_wait_together_have_the_fields_that_each_asked_for(served: Any) -> None:
    model, held = served.server.registry.models["de-en"], threading.Event()
    body = {"q": "a dog", "source": "de", "target": "en"}
    fields = [{}, {"alignments": "words"}, {"scores": True}, {"alignments": "tokens"}, {}]
    model.worker.submit(held.wait)
    with ThreadPoolExecutor(len(fields)) as pool:
        answers = pool.map(lambda more: call(served, "/translate", {**body, **more})[1], fields)
        while model.num_texts < len(fields):
            time.sleep(0.002)
        held.set()
        plain, words, scored, tokens, again = answers
    assert [*plain] == [*again] == ["translatedText", "reasons", "reasonCodes"]
    assert [*scored] == [*plain, "scores"]
    assert words["alignments"][0]["source"] == ["a", "dog"]
    assert tokens["alignments"][0]["source"] == ["▁a", "▁dog"]


def test_texts_of_a_batch_are_searched_again_in_their_own_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose sources begin with a tag, all were searched in that of the first one."""
    from heedful.serve.glossaries import Glossaries
    from running_server import running

    model, path, held = model_of("vaswani2017"), tmp_path / "terms.tsv", threading.Event()
    tags = {"en": "the", "fr": "dog"}
    model.metadata = replace(model.metadata, src_language="de", language_tags=tags)
    path.write_text("cat\tmat sat\nran\tmat sat\n")
    search, searched = model.generations, set()

    def noted(texts: list[str], options: Any, **more: Any) -> Any:
        searched.update((text, options.tgt_language) for text in texts)
        return search(texts, options, **more)

    monkeypatch.setattr(model, "generations", noted)
    bodies = [{"q": "the cat", "target": "en"}, {"q": "a dog ran", "target": "fr"}]
    with running({"m": model}) as server, ThreadPoolExecutor(len(bodies)) as pool:
        served = server.server.registry.models["m"]
        served.glossaries = Glossaries("m", model, path)
        served.worker.submit(held.wait)
        answers = pool.map(
            lambda body: call(server, "/translate", {**body, "source": "de"}), bodies
        )
        while len(served._jobs) < len(bodies):
            time.sleep(0.002)
        held.set()
        assert [status for status, _ in answers] == [200, 200]
    assert searched == {("the cat", "en"), ("a dog ran", "fr")}


def test_a_converted_backend_has_scores_and_alignments_too(tmp_path: Path) -> None:
    """The net itself aligns what the backend translates."""
    pytest.importorskip("ctranslate2")
    import heedful
    from backend_models import saved
    from heedful.insight import alignments
    from running_server import running

    saved("vaswani2017", tmp_path / "model")
    model: Any = heedful.load(tmp_path / "model", backend="ctranslate2", precision="float32")
    body = {"q": ["the cat sat", "a dog"], "target": "en", "source": "de", "alternatives": 1}
    with running({"model": model}) as server:
        more = {"scores": True, "alignments": "tokens"}
        _, answer = call(server, "/translate", {**body, **more})
    outputs = model.generate(body["q"], return_details=True, num_return=2, beam_size=5)
    assert model.backend.name == "ctranslate2"
    for entries, scores, hypotheses, text in zip(
        answer["alignments"], answer["scores"], outputs, body["q"], strict=True
    ):
        assert scores == pytest.approx([output.score for output in hypotheses], abs=1e-5)
        for entry, output in zip(entries, hypotheses, strict=True):
            expected = alignments(model, text, output.ids, unit="tokens")
            assert {tuple(link) for link in entry["links"]} == expected.links


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/translate", {"q": "a", "source": "fr", "target": "en"}, 400, "fr is not supported"),
        ("/translate", {"q": "a", "source": "de", "target": "fr"}, 400, "fr is not supported"),
        ("/translate", {"q": "a", "source": "en", "target": "de"}, 400, "has de to en"),
        ("/translate", {"q": "a", "source": "de"}, 400, "Invalid request: missing target param"),
        ("/translate", {"q": "a", "source": "de", "target": ""}, 400, "missing target parameter"),
        ("/translate", {"q": [], "source": "de", "target": "en"}, 400, "q: "),
        (
            "/translate",
            {"source": "de", "target": "en"},
            400,
            "Invalid request: missing q parameter",
        ),
        ("/translate", {"q": "a", "source": "de", "target": "en", "format": "md"}, 400, "format"),
        ("/translate", {"q": "<code>a", "target": "en", "format": "html"}, 400, "is not closed"),
        (
            "/translate",
            {"q": "<b>a " * 300 + "</b>" * 300, "source": "de", "target": "en", "format": "html"},
            400,
            "nested more than 200 deep",
        ),
        ("/translate", {"q": "a", "target": "en", "alternatives": 99}, 400, "at most 7"),
        (
            "/translate",
            {"q": "dog" * 200, "source": "de", "target": "en"},
            400,
            "the model allows 48",
        ),
        ("/translate", {"q": ["a"] * 65, "source": "de", "target": "en"}, 400, "may have 64 texts"),
        ("/translate", {"q": 5, "source": "de", "target": "en"}, 400, "q: "),
        ("/detect", {}, 400, "missing q parameter"),
    ],
)
def test_what_cannot_be_translated_is_refused(
    served: Any, path: str, body: Any, status: int, reason: str
) -> None:
    answer = call(served, path, body)
    assert answer[0] == status
    assert reason in answer[1]["error"]
    if reason == "the model allows 48":
        assert answer[1]["code"] == "context_length_exceeded"
        assert answer[1]["values"]["tokens"] > answer[1]["values"]["limit"] == 48


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_several_labels_and_values(
    served: Any, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.models["sentiment"]
    monkeypatch.setattr(model, "metadata", replace(model.metadata, problem=problem))
    _, answer = call(served, "/classify", {"texts": "the cat"})
    expected = model.classify("the cat")
    if problem == "regression":
        assert answer["results"] == {"values": pytest.approx(expected.values, abs=1e-5)}
        return
    assert answer["results"]["labels"] == [*expected.labels]
    assert answer["results"]["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)


def test_classes_and_masks(served: Any) -> None:
    model, texts = served.models["sentiment"], ["the cat", "a dog ran home"]
    status, answer = call(served, "/classify", {"texts": texts})
    assert status == 200
    for result, text in zip(answer["results"], texts, strict=True):
        expected = model.classify(text)
        assert result["label"] == expected.label
        assert result["probabilities"] == pytest.approx(expected.probabilities)
    pairs = {"texts": "the cat", "pairs": "a dog", "model": "sentiment"}
    _, answer = call(served, "/classify", pairs)
    expected = model.classify("the cat", pairs="a dog")
    assert answer["results"]["probability"] == pytest.approx(expected.probability)
    masked = ["the <mask> sat", "a [MASK] ran <mask>"]
    _, answer = call(served, "/fill", {"texts": masked, "top_k": 2})
    assert "results" in answer, answer
    for masks, text in zip(answer["results"], masked, strict=True):
        fillings = served.models["bert"].fill(text, top_k=2)
        assert [[f["text"] for f in mask] for mask in masks] == [
            [f.text for f in mask] for mask in fillings
        ]
    for path, body, reason in (
        ("/fill", {"texts": "the cat"}, "the text has no"),
        ("/fill", {"texts": "<mask>", "model": "gpt"}, "gpt is a language model"),
        ("/classify", {"texts": ["a"], "pairs": "b"}, "a list for a list"),
        ("/classify", {"texts": "the cat " * 90}, "tokens, but the model allows"),
    ):
        status, answer = call(served, path, body)
        assert status in (400, 404)
        assert reason in answer["error"]["message"]


def test_the_routes_of_a_missing_family_say_so() -> None:
    from running_server import model_of, running

    with running({"gpt": model_of("gpt2")}) as served:
        for path, body, reason in (
            ("/translate", {"q": "a", "source": "de", "target": "en"}, "needs a translator"),
            ("/classify", {"texts": "a"}, "needs a classifier; models for this route: none"),
            ("/fill", {"texts": "a"}, "needs a masked language model"),
            ("/detect", {"q": "a"}, "no translator"),
        ):
            status, answer = call(served, path, body)
            assert status == 404
            message = (
                answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
            )
            assert reason in message
