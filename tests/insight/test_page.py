"""The inspection page: its content, its safety, its command, and its use in a browser."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from backend_models import model_of
from heedful import insight
from heedful.cli.inspect_ import PageFlags, inspect_
from heedful.errors import UserError
from heedful.insight.attribution import explain
from heedful.insight.notes import Note, page_texts
from heedful.insight.page import write_page
from heedful.insight.page_data import (
    MAX_INTERVALS,
    PageOptions,
    _aligned_in,
    _bytes_of,
    views_of_text,
)
from heedful.insight.reading import read

PAGE = ("target", "patch_from", "layers", "heads", "tokens", "sentences", "projection")
CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "</script><script>document.title='run'</script> &amp; \u202eabc \u0000 😀 <b>x</b> \u2028"
KINDS: dict[str, dict[str, Any]] = {
    "vaswani2017": {},
    "gpt2": {},
    "bert-mlm": {"head": "mlm"},
    "bert-classify": {"head": "classify"},
}
TEXTS = page_texts()
ROUNDED: dict[str, Any] = {"rtol": 0, "atol": 5e-5 + 1e-6}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, keys in KINDS.items():
        made[name] = tmp_path_factory.mktemp("models") / name
        model_of(name.split("-")[0], **keys).save(made[name])
    return made


def data_of(page: Path) -> Any:
    [content] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.S
    )
    return json.loads(content)


def run(folder: Path, out: Path, **options: Any) -> Any:
    """The data of the page that the command writes."""
    defaults = {"text": "the cat sat", "overwrite": False, "device": "cpu"}
    if options.get("text", "") is not None and "bert" not in folder.name:
        defaults["options"] = {"max_new_tokens": 4}
    flags = {name: options.pop(name, None) for name in PAGE}
    defaults["page"] = PageFlags(**flags)
    inspect_(model=folder, out=out, **{"options": {}, **defaults, **options})
    return data_of(out)


def assert_shown(part: dict[str, Any], exact: np.ndarray) -> None:
    """The attention weights of a page, a byte each, are these."""
    weights = np.frombuffer(base64.b64decode(part["weights"]), np.uint8)
    np.testing.assert_allclose(weights.reshape(exact.shape) / 255, exact, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_page_has_the_values_of_the_library(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    content = run(folders[name], tmp_path / "page.html", patch_from="the dog ran")
    views = content["views"]
    assert content["facts"].keys() <= TEXTS["zh"].keys()
    expected = {"tokens", "attention", "lens", "attributions", "patching", "embeddings"}
    expected |= {"search"} if name in ("vaswani2017", "gpt2") else set()
    expected |= {"alignment"} if name == "vaswani2017" else set()
    assert set(views) == expected
    model = heedful.load(folders[name])
    options = {"max_new_tokens": 4} if "search" in views else {}
    maps = insight.attention(model, "the cat sat", **options).maps
    assert [part["part"] for part in views["attention"]] == [*maps]
    for part in views["attention"]:
        assert_shown(part, maps[part["part"]].weights)
    stacks = [entry["stack"] for entry in views["patching"]]
    assert set(stacks) == {*insight.watching.stacks_of(model.net)}
    for entry in views["patching"]:
        [output] = {"bert-classify": [entry["output"]]}.get(name, [None])
        exact = insight.patching(
            model, "the cat sat", "the dog ran", stack=entry["stack"], output=output,
            position=entry["position"], **options,
        )  # fmt: skip
        assert entry["output"] == exact.output.name
        assert entry["value"] == pytest.approx(exact.value, rel=1e-5)
        assert entry["other"] == pytest.approx(exact.other_value, rel=1e-5)
        assert (entry["tokens"], entry["others"]) == ([*exact.tokens], [*exact.other_tokens])
        np.testing.assert_allclose(entry["effects"], exact.effects, **ROUNDED)


@pytest.mark.parametrize("name", KINDS)
def test_each_view_has_its_layers_tokens_and_sides_in_order(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    views, model = run(folders[name], tmp_path / "page.html")["views"], heedful.load(folders[name])
    options = {"max_new_tokens": 4} if "search" in views else {}
    lens, shown = insight.logit_lens(model, "the cat sat", **options), views["lens"]
    assert (shown["layers"], shown["positions"]) == ([*lens.layers], [*lens.positions])
    assert (shown["ranks"], shown["names"]) == (
        lens.ranks.tolist(), [[[*cell] for cell in row] for row in lens.names]
    )  # fmt: skip
    np.testing.assert_allclose(shown["probabilities"], lens.probabilities, **ROUNDED)
    np.testing.assert_allclose(shown["final"], lens.final_probabilities, **ROUNDED)
    reading = read(model, "the cat sat", **options)
    for entry in views["attributions"]:
        output = entry["position"], entry["output"] if name == "bert-classify" else None
        methods: dict[str, Any] = {"gradients": "integrated_gradients", "occlusion": "occlusion"}
        for key, method in methods.items():
            limits: Any = {"tolerance": 0.01, "max_intervals": MAX_INTERVALS}
            exact = explain(reading, *output, method, **limits)
            for side, (own, scores) in zip(entry["sides"], exact.scores.items(), strict=True):
                assert (side["side"], side["tokens"]) == (own, [*exact.tokens[own]])
                np.testing.assert_allclose(side[key], scores, **ROUNDED)
        assert entry["value"] == pytest.approx(exact.value, rel=1e-5)
    if name == "vaswani2017":
        [best, *_] = model.generate("the cat sat", return_details=True, **options)
        alignment = insight.alignments(model, "the cat sat", best.ids, unit="tokens")
        shown = views["alignment"]
        assert (shown["source"], shown["target"]) == ([*alignment.source], [*alignment.target])
        np.testing.assert_allclose(shown["weights"], alignment.weights, **ROUNDED)
        tree, shown = insight.search_tree(model, "the cat sat", **options), views["search"]
        assert (shown["best"], shown["text"]) == ([*tree.best], tree.text)
        assert [node["id"] for node in shown["nodes"]] == [node.id for node in tree.nodes]
    if name == "gpt2":
        trace, shown = insight.sampling_steps(model, "the cat sat", **options), views["search"]
        assert [step["id"] for step in shown["steps"]] == [step.id for step in trace.steps]
        for step, own in zip(shown["steps"], trace.steps, strict=True):
            last, exact_last = step["distributions"][-1], own.distributions[-1]
            assert last["ids"] == [*exact_last.ids]
            np.testing.assert_allclose(last["probabilities"], exact_last.probabilities, **ROUNDED)
    for entry in views["embeddings"]:
        exact_map = insight.embedding_map(model, entry["kind"])
        assert (entry["names"], entry["ids"]) == ([*exact_map.names], [*exact_map.ids])
        assert entry["neighbors"] == exact_map.neighbors.tolist()
        np.testing.assert_allclose(entry["points"], exact_map.points, **ROUNDED)


def test_parts_are_chosen_and_left_out_with_a_note(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    content = run(folders["gpt2"], tmp_path / "page.html", layers="-1", heads="1", tokens="1:3")
    [part] = content["views"]["attention"]
    assert (part["layers"], part["heads"]) == ([1], [1])
    assert part["queries"] == part["keys"]
    assert len(part["queries"]) == 2
    exact = insight.attention(heedful.load(folders["gpt2"]), "the cat sat")["decoder"].weights
    assert_shown(part, exact[1:, 1:, 1:3, 1:3])
    assert content["notes"] == [["note_tokens", 1, 2, 3]]
    assert str(Note("note_tokens", (1, 2, 3))).startswith("tokens 1 to 2 of 3 are shown")
    lines = tmp_path / "lines"
    lines.write_text("good\tthe cat\nbad\ta dog\ngood\tcats ran\n")
    content = run(folders["gpt2"], tmp_path / "other.html", sentences=lines)
    [*_, sentences] = content["views"]["embeddings"]
    assert (sentences["kind"], sentences["labels"]) == ("sentences", ["good", "bad", "good"])


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"layers": "7"}, "there are layers 0 to 1, not 7"),
        ({"heads": "2"}, "there are heads 0 to 1, not 2"),
        ({"layers": "a"}, "--layers must be numbers"),
        ({"tokens": "5"}, "--tokens must be a range"),
        ({"tokens": "9:20"}, "are not in the text"),
        ({"target": "a dog"}, "a target is for encoder-decoders"),
        ({"text": "cat " * 60}, "the model allows 48; give a shorter text"),
        ({"text": ""}, None),
        ({"text": "\ud800"}, "lone surrogate"),
        ({"text": None}, "is not the folder of a run"),
        ({"text": None, "target": "a"}, "--target is for a text"),
        ({"projection": "map"}, "projection must be"),
        ({"patch_from": "the cat"}, "texts have 3 and 2 tokens"),
        ({"patch_from": "the cat sat"}, "have the same tokens"),
        ({"text": None, "patch_from": "a"}, "--patch-from is for a text"),
    ],
)
def test_bad_input_leaves_no_page(
    folders: dict[str, Path], tmp_path: Path, keywords: dict[str, Any], problem: str | None
) -> None:
    out = tmp_path / "page.html"
    if problem is None:  # an empty prompt begins with the end token
        run(folders["gpt2"], out, **keywords)
        return
    with pytest.raises(UserError, match=problem) as raised:
        run(folders["gpt2"], out, **keywords)
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


def test_patching_needs_an_output_head(tmp_path: Path) -> None:
    model_of("bert", head="none").save(tmp_path / "bert")
    with pytest.raises(UserError, match="has no output head, only states; leave out"):
        run(tmp_path / "bert", tmp_path / "page.html", patch_from="the dog ran")
    assert "attention" in run(tmp_path / "bert", tmp_path / "page.html")["views"]


def test_an_existing_page_is_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("mine")
    with pytest.raises(UserError, match="exists; give another --out"):
        run(folders["gpt2"], out)
    assert out.read_text() == "mine"
    run(folders["gpt2"], out, overwrite=True)


def test_hostile_texts_are_data(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    pieces = [{"token": HOSTILE, "id": 1, "bytes": "", "special": False, "unknown": True}]
    tokens = [{"side": "text", "text": HOSTILE, "normalized": HOSTILE, "pieces": pieces}]
    write_page(out, title=HOSTILE, facts={"name": HOSTILE}, views={"tokens": tokens})
    page = out.read_text("utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert data_of(out)["views"]["tokens"][0]["text"] == HOSTILE
    assert "<b>x" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    for element in ("script", "style"):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src &#39;sha256-{digest}&#39;" in policy[1].replace("&#43;", "+")
    assert "unsafe" not in policy[1]
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?https?:", page)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte_bpe", "byte"])
def test_the_bytes_of_tokens_are_those_of_their_text(kind: str) -> None:
    """Also of a space before a word, and of parts of a character."""
    from heedful.data.tokenizer import train_tokenizer

    size = None if kind == "byte" else 300
    lines = ["the cat \N{CJK UNIFIED IDEOGRAPH-949F}"]
    tokenizer = train_tokenizer(lines, kind=kind, vocab_size=size, or_fewer=True)
    text = "the cat \N{CJK UNIFIED IDEOGRAPH-949F}"
    pieces = [_bytes_of(tokenizer, token) for token in tokenizer.encode(text)]
    assert b"".join(pieces).decode().strip() == text
    assert _bytes_of(tokenizer, tokenizer.eos_id) == b"</s>"


def test_bytes_on_the_page_have_the_space_before_a_word(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    content = run(folders["gpt2"], tmp_path / "page.html", text="the cat")
    pieces = content["views"]["tokens"][0]["pieces"]
    assert [piece["token"] for piece in pieces] == ["\u2581the", "\u2581cat"]
    assert [piece["bytes"] for piece in pieces] == ["20 74 68 65", "20 63 61 74"]


def test_a_side_without_tokens_in_the_window_is_left_out(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    content = run(folders["vaswani2017"], tmp_path / "page.html", text="the cat sat " * 3,
                  target="a", tokens="4:8")  # fmt: skip
    views = content["views"]
    assert [part["part"] for part in views["attention"]] == ["encoder"]
    assert not views.keys() & {"alignment", "lens", "attributions"}


def test_views_of_a_window_have_the_numbers_of_its_positions(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    content = run(folders["gpt2"], tmp_path / "page.html", patch_from="the dog ran", tokens="1:3")
    views = content["views"]
    entries = [*views["attention"], views["lens"], *views["patching"]]
    assert {entry["first"] for entry in entries} == {1}
    content = run(folders["bert-classify"], tmp_path / "other.html", tokens="1:3")
    assert content["views"]["lens"]["first"] == 0  # the first token, which the head reads


def test_aligned_tokens_have_the_numbers_of_their_positions(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those of the attention map: a target token has that of the position that predicts it."""
    content = run(folders["vaswani2017"], tmp_path / "page.html", text="the cat sat",
                  target="a cat sat", tokens="1:3")  # fmt: skip
    view = content["views"]["alignment"]
    assert view["numbers"] == {"source": [1, 2], "target": [1, 2]}
    assert view["target"] == ["\u2581cat", "\u2581sat"]
    [cross] = [part for part in content["views"]["attention"] if part["part"] == "cross"]
    assert (cross["first"], cross["keys"][:2]) == (1, view["source"])


def test_the_sum_of_scores_has_those_of_tokens_that_are_not_shown(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    content = run(folders["gpt2"], tmp_path / "page.html", text="the cat sat", tokens="1:3")
    for entry in content["views"]["attributions"]:
        shown = sum(sum(side["gradients"]) for side in entry["sides"])
        assert abs(entry["sum"] - (entry["value"] - entry["baseline"])) < entry["error"] + 1e-4
        assert abs(entry["sum"] - shown) > 1e-3


def test_aligned_tokens_are_those_at_the_positions_of_the_window() -> None:
    """Special tokens, such as the tag of a language, have positions too."""
    tokenizer = model_of("vaswani2017").tokenizer
    ids = [tokenizer.bos_id, *tokenizer.encode("the cat sat"), tokenizer.eos_id]
    assert _aligned_in(tokenizer, ids, range(9)) == [0, 1, 2]
    assert _aligned_in(tokenizer, ids, range(2, 4)) == [1, 2]
    assert _aligned_in(tokenizer, ids, range(4, 9)) == []


def test_steps_and_labels_that_are_left_out_are_named(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, options in enumerate(({}, {"max_new_tokens": 30})):
        out = tmp_path / f"{number}.html"
        content = run(folders["gpt2"], out, text="the cat", options=options)
        assert len(content["views"]["search"]["steps"]) == 24
        assert content["notes"] == [["note_steps", 24]]
    monkeypatch.setattr("heedful.insight.page_data.MAX_OUTPUTS", 1)
    content = run(folders["gpt2"], tmp_path / "last.html", text="the cat")
    assert [entry["position"] for entry in content["views"]["attributions"]] == [1]
    assert content["notes"] == [["note_last_outputs", 1]]
    content = run(folders["bert-classify"], tmp_path / "labels.html")
    assert len(content["views"]["attributions"]) == 1
    assert content["notes"] == [["note_outputs", 1]]
    monkeypatch.setattr("heedful.insight.page_data.MAX_WEIGHTS", 10)  # of 2 × 2 × 2² weights
    monkeypatch.setattr("heedful.insight.page_data.MAX_POINTS", 30)
    content = run(folders["gpt2"], tmp_path / "few.html", text="the cat")
    [part] = content["views"]["attention"]
    assert part["layers"] == [0]
    model = heedful.load(folders["gpt2"])
    assert_shown(part, insight.attention(model, "the cat")["decoder"].weights[:1])
    assert content["notes"] == [["note_last_outputs", 1], ["note_layers", 2]]
    maps = {entry["kind"]: entry for entry in content["views"]["embeddings"]}
    assert (maps["tokens"]["left_out"], len(maps["tokens"]["points"])) == (10, 30)


def test_a_search_without_any_token_is_shown() -> None:
    generation = {"beam_size": 2, "max_new_tokens": 4, "prefix_function": lambda number, ids: []}
    views, _ = views_of_text(model_of("gpt2"), "the cat", None, PageOptions(generation=generation))
    assert views["search"]["nodes"] == []
    assert views["search"]["stop"]["kind"] == "dead_end"


def test_the_page_of_a_regression_has_no_probabilities() -> None:
    model = model_of("bert", head="classify")
    model.metadata = replace(model.metadata, problem="regression")
    views, notes = views_of_text(model, "the cat sat", None, PageOptions())
    assert "lens" not in views
    assert "attributions" in views
    assert notes == [Note("note_regression")]
    with pytest.raises(UserError, match="values, not probabilities"):
        views_of_text(model, "the cat sat", None, PageOptions(patch_from="the dog ran"))


def test_both_languages_have_every_text() -> None:
    assert TEXTS["en"].keys() == TEXTS["zh"].keys()
    for key, text in TEXTS["en"].items():
        slots = re.findall(r"\{\d\}", text)
        assert sorted(re.findall(r"\{\d\}", TEXTS["zh"][key])) == sorted(slots), key
    folder = Path(insight.__file__).parent
    script = (folder / "page.js").read_text("utf-8")
    sources = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    assert {*re.findall(r'Note\("(\w+)"', sources)} == {k for k in TEXTS["en"] if "note_" in k}
    used = set(re.findall(r'\bt\("(\w+)"', script)) | set(re.findall(r'intro\("(\w+)"', script))
    assert used - {"stop_"} <= TEXTS["en"].keys()


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium")
@pytest.mark.parametrize("case", ["1280-light-en", "390-dark-zh"])
def test_the_page_in_a_browser(folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    """No request, no error; every view by keyboard; both languages; hostile texts stay text."""
    pytest.importorskip("playwright.sync_api", reason="there is no Chromium")
    from playwright.sync_api import sync_playwright

    out, (width, theme, language) = tmp_path / "page.html", case.split("-")
    hostile = "the </script><s>\u202e"
    options = {"max_new_tokens": 4, "beam_size": 2}
    more = {"patch_from": f"a{hostile[3:]}", "tokens": "0:8", "options": options}
    content = run(folders["vaswani2017"], out, text=hostile, **more)
    longest = max(len(side["pieces"]) for side in content["views"]["tokens"])
    assert longest > 8
    problems: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(
            viewport={"width": int(width), "height": 900}, offline=True,
            color_scheme="dark" if theme == "dark" else "light",
            locale="zh-CN" if language == "zh" else "en-US",
        )  # fmt: skip
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url)
                if request.url != out.as_uri() else None)  # fmt: skip
        page.goto(out.as_uri())
        assert page.title().endswith(hostile)
        assert page.locator("s").count() == 0
        tabs = page.locator("[role=tab]")
        names = tabs.all_inner_texts()
        assert page.locator(".note").all_inner_texts() == [  # notes and facts in both languages
            TEXTS[language]["notes"] + ": " + TEXTS[language]["note_tokens"].format(0, 7, longest)
            + TEXTS[language]["sentence_end"].strip()
        ]  # fmt: skip
        facts = page.locator(".facts").inner_text()
        assert all(TEXTS[language][key] in facts for key in ("architecture", "task", "parameters"))
        assert names[0] == TEXTS[language]["tokens"]
        tabs.first.focus()
        for name in names:
            assert page.evaluate("document.activeElement.innerText") == name
            panel = page.locator("section:not([hidden])")
            assert panel.count() == 1
            assert "[object" not in panel.inner_text()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.keyboard.press("ArrowRight")
        page.locator("#tab-attention").click()
        page.locator("#head-1-0").focus()
        page.keyboard.press("Enter")
        assert page.locator("#head-1-0").get_attribute("aria-pressed") == "true"
        page.locator("#view-attention canvas[role=img]").focus()
        page.keyboard.press("ArrowDown")
        assert (
            page.locator("#view-attention [role=status]").first.inner_text()
            != TEXTS[language]["hover"]
        )
        page.locator("#view-attention details summary").first.click()
        page.locator("#view-attention details table").first.wait_for(timeout=5000)
        page.locator("#sort-2").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "sort-2"
        assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
        page.locator("#tab-lens").click()
        page.locator("#lens-0-0").focus()
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.id") == "lens-1-0"
        assert page.locator("#view-lens .cell[tabindex='0']").count() == 1
        page.locator("#lens-color").select_option("rank")
        assert page.evaluate("document.activeElement.id") == "lens-color"
        page.locator("#tab-patching").click()
        page.locator("#patch-0-0").focus()
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.id") == "patch-1-0"
        page.locator("#stack-decoder").click()
        assert page.locator("#stack-decoder").get_attribute("aria-pressed") == "true"
        page.locator("#language").click()
        other = "en" if language == "zh" else "zh"
        assert tabs.all_inner_texts()[0] == TEXTS[other]["tokens"]
        page.locator("#theme").click()
        is_dark = "document.documentElement.classList.contains('dark')"
        assert page.evaluate(is_dark) == (theme != "dark")
        page.evaluate("document.documentElement.classList.add('dark')")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert not page.evaluate(is_dark)  # paper is light
        assert page.locator("section[data-drawn]").count() == len(names)
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(is_dark)
        browser.close()
    assert problems == []


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium")
def test_long_words_and_labels_are_not_wider_than_a_phone(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="there is no Chromium")
    from playwright.sync_api import sync_playwright

    long, out = "a" * 300, tmp_path / "page.html"
    piece = {"token": long, "id": 1, "bytes": "61", "special": False, "unknown": False}
    tokens = [{"side": "text", "text": long, "normalized": f"{long}b", "pieces": [piece]}]
    side = {"side": "text", "tokens": [long], "gradients": [0.5], "occlusion": [0.5]}
    scores = {"output": long, "position": 0, "value": 1, "baseline": 0.5, "sum": 0.5, "error": 0}
    views = {"tokens": tokens, "attributions": [{**scores, "sides": [side]}]}
    write_page(out, title=long, facts={}, views=views)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 390, "height": 900}).new_page()
        page.goto(out.as_uri())
        for view in views:
            page.click(f"#tab-{view}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        browser.close()


def test_translate_writes_alignments(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each output, blank for a blank one, equal to those of the library."""
    from heedful.cli.app import make_app

    monkeypatch.setattr("heedful.cli.alignments._BATCH", 4)  # outputs of more than one pass
    monkeypatch.setattr("heedful.cli.lines.CHUNK", 2)
    (tmp_path / "lines").write_text("the cat sat\n\na dog ran\n")
    arguments = ["translate", str(folders["vaswani2017"]), "-i", str(tmp_path / "lines")]
    out, pairs = tmp_path / "out", tmp_path / "pairs"
    flags = ["-o", str(out), "--num-return", "2", "--beam-size", "2", "--device", "cpu"]
    more = ["--alignments", str(pairs), "--alignment-unit", "tokens"]
    make_app(["translate", "verify"])([*arguments, *flags, *more], standalone_mode=False)
    model = heedful.load_translator(folders["vaswani2017"])
    expected = []
    for text in ("the cat sat", "", "a dog ran"):
        outputs = model.generate(text, beam_size=2, num_return=2, return_details=True)
        expected += [
            insight.alignments(model, text, output.ids, unit="tokens").pharaoh() if text else ""
            for output in outputs
        ] + [""] * (2 - len(outputs))
    assert pairs.read_text().splitlines() == expected
    assert len(out.read_text().splitlines()) == len(expected) == 6
    (tmp_path / "lines").write_text("the \N{GRINNING FACE} cat\n")
    words = ["--alignments", str(pairs), "--beam-size", "2"]
    make_app(["translate", "verify"])([*arguments, *flags[:2], *words], standalone_mode=False)
    [output] = model.generate("the \N{GRINNING FACE} cat", beam_size=2, return_details=True)
    expected = insight.alignments(model, "the \N{GRINNING FACE} cat", output.ids)
    assert pairs.read_text() == expected.pharaoh() + "\n"
    assert len(expected.source) == 3
    for wrong, problem in [
        (["--alignment-unit", "words"], "give both"),
        (["--alignments", str(tmp_path / "no"), "--alignment-unit", "lines"], "unit must be"),
    ]:
        with pytest.raises(UserError, match=problem):
            make_app(["translate", "verify"])([*arguments, *wrong], standalone_mode=False)
    assert not (tmp_path / "no").exists()
