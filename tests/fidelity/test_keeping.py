"""Translators that are trained with data.keep: outputs have the pieces of their sources."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful import UserError
from heedful.cli.long_lines import LongLines
from heedful.data.prepared import cache_folder
from heedful.documents import read_document, translate_document
from heedful.documents.sentences import SplitText
from heedful.documents.translating import fits_model
from heedful.fidelity import CHARACTERS, Keep, count_masks, place_masks, with_accelerator
from heedful.fidelity.masking import mask_pair, mask_text
from heedful.fidelity.pieces import counts, find_pieces
from heedful.insight.alignment import align, align_outputs
from heedful.insight.reading import read
from heedful.options import Options
from heedful.pipelines import Translator
from heedful.pipelines.generations import Generation
from heedful.pipelines.keeping import Source, _Searches, kept_generations
from heedful.recipe_files import recorded_recipe
from heedful.training.events import Evaluated
from heedful.training.folder import facts_of_run
from heedful.training.listeners import read_log

SOURCES = ["Open %s on page 12", "1,000.5 of {n} <b>a</b>", "no piece", "7 7 %1$s (see X-12)", ""]
ROWS = [(f"open %s on page {n} a{n % 7}", f"öffne %s auf Seite {n} a{n % 7}") for n in range(90)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, so that its outputs are those of a random net."""
    folder = tmp_path_factory.mktemp("keep")
    (folder / "pairs.tsv").write_text("".join(f"{src}\t{tgt}\n" for src, tgt in ROWS))
    keys = {
        "data.train.file": str(folder / "pairs.tsv"),
        "data.train.src_field": 1,
        "data.train.tgt_field": 2,
        "data.valid_size": 10,
        "data.keep": True,
        "data.keep_patterns": [r"X-\d+"],
        "training.max_steps": 1,
        "model": {"architecture": "vaswani2017", "d_model": 16, "num_heads": 2, "d_ff": 16},
    }
    heedful.train(heedful.load_recipe("translation", keys), out=folder / "run", progress=False)
    return folder / "run"


@pytest.fixture(scope="module")
def model(run: Path) -> Translator:
    return heedful.load_translator(run, backend="eager")


@pytest.mark.parametrize(
    "options",
    [{}, {"beam_size": 1}, {"temperature": 1.0, "seed": 1}, {"num_return": 3}, {"beam_size": 2}],
)
def test_outputs_of_any_net_have_the_pieces_of_their_sources(
    model: Translator, options: dict[str, Any]
) -> None:
    details = model.generate(SOURCES, return_details=True, **options)
    for source, outputs in zip(SOURCES, details, strict=True):
        for output in outputs:
            assert counts(output.text, (r"X-\d+",)) == counts(source, (r"X-\d+",))
            assert count_masks(output.text).total() == 0
    assert any(output.reasons for outputs in details for output in outputs)
    texts = model.translate(SOURCES, **options)
    if "num_return" not in options:
        assert texts == [best.text for best, *_ in details]


def test_what_fits_a_model_is_read_with_its_masks_too(model: Translator) -> None:
    """A text with as many bytes as the model reads tokens was refused, and not cut: a tokenizer
    puts a space before it. Masks can have more tokens, too."""
    fits = fits_model(model)
    texts = [" ".join(["7"] * count) for count in range(1, model.config.max_length)]
    fitting = [text for text in texts if fits(text)]
    assert 1 < len(fitting) < len(texts)
    model.prompt_ids(fitting)


def test_what_the_model_reads_as_masks_is_no_longer_than_these(model: Translator) -> None:
    """A text was cut at its addresses, which the model does not read."""
    text = " ".join(["siehe", *[f"https://a.b/{'x' * (model.config.max_length // 3)}"] * 4])
    assert fits_model(model)(text)
    assert not fits_model(model, keep=False)(text)
    model.prompt_ids([text])
    assert SplitText(text, fits_model(model), by_sentence=False).rows == [text]
    for keep in (True, False):
        [rows] = LongLines(model, None, None, keep=keep).split(iter([[text]]))
        assert (rows == [text]) == keep


def test_without_keep_the_net_reads_the_text_itself(model: Translator) -> None:
    source = Keep((r"X-\d+",)).mask(SOURCES[0])
    masked = model.translate(source.text, keep=False, max_new_tokens=6)
    [output] = model.generate(SOURCES[0], return_details=True, max_new_tokens=6, beam_size=1)
    assert counts(output.text) == counts(SOURCES[0])
    assert not counts(masked) & counts(SOURCES[0])


def test_texts_in_capitals_are_read_as_sentences(model: Translator) -> None:
    """BLEU of a translator of software fell from 36 to 2 where its texts were in capitals."""
    plain, capitals = (
        "Schließ %s und die seite <b>jetzt</b>",
        "SCHLIEẞ %s UND DIE SEITE <b>JETZT</b>",
    )
    assert model.prompt_ids([capitals]) == model.prompt_ids([plain])
    [sentence], [output] = model.generate([plain, capitals], return_details=True)
    assert (output.ids, counts(output.text)) == (sentence.ids, counts(capitals))
    mask, begin, end = model.metadata.keep.mask(capitals).pieces  # type: ignore[union-attr]
    made = replace(output, text=f"straße {mask} {begin}zu{end}", reasons=())
    [[made]] = kept(model, [capitals], [[made]], model.options())
    assert (made.text, made.reasons) == ("STRAẞE %s <b>ZU</b>", ())
    [alignment] = model.token_alignments([capitals], [output])
    [other] = model.token_alignments([plain], [sentence])
    assert alignment is not None
    assert other is not None
    assert alignment.source == other.source
    assert alignment.target == other.target
    [links] = align(model, model.prompt_ids([capitals]), [output.ids], source_texts=[capitals])
    assert links.source[0] == "SCHLIEẞ"


def test_outputs_that_the_limit_cut_are_not_found(model: Translator) -> None:
    """With a glossary one in place of a complete output had more terms, and no end."""
    keep = model.metadata.keep
    assert keep is not None
    texts = [keep.mask(text).text for text in ("a %s %s %d %d {n} 1 2 3", "no piece")]
    options = model.options(max_new_tokens=2, glossary={"piece": "auf"})
    found = _Searches(model, model.completed(options)).outputs(texts)
    assert found[0] == []
    assert all(output.finished for output in found[1])


def test_capitals_that_are_no_sentence_stay() -> None:
    keep = Keep()
    texts = [
        *("SQL SERVER", "Die DATEI DER SEITE", "12 34 56", "日本語 の 文", "%PROD_NAME %S A"),
        *(
            "请打开 USB 和 PDF 文件",
            "USB ケーブルを接続してください。次に電源",
            "افتح ملف PDF الآن",
        ),
        *("JPG PNG BMP GIF", "USB HDMI RGB VGA", "BSD GPL LGPL"),
        "VISIT HTTP://EXAMPLE.COM/ABC FOR MORE",
        f"PLEASE OPEN {CHARACTERS[0]} WITH %S AND {{NAME}}",
    ]
    for text in texts:
        assert keep.mask(text) == mask_text(text, [*find_pieces(text)])
    masked = keep.mask("NICHT 5 MAẞE. NEIN DANKE!")
    assert masked.text == f"Nicht {CHARACTERS[0]} maße. Nein danke!"
    assert masked.cased("straße ŉ ﬁ 5 µm") == "STRAẞE ŉ ﬁ 5 µM", "of equal length"
    assert masked.cased("see https://a.org/x or %s") == "SEE https://a.org/x OR %s"
    assert masked.cased("dosyaları sil") == "DOSYALARI SİL"
    assert keep.mask("İKİ AÇIK DOSYA").text == "İki açık dosya"
    assert keep.mask("ΕΔΩ Ο ΟΔΥΣΣΕΥΣ ΜΕΝΕΙ").text == "Εδω ο οδυσσευς μενει"


def test_the_run_is_of_masked_pairs_and_shows_texts(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["keep"] == {"patterns": [r"X-\d+"]}
    model = heedful.load_translator(run, backend="eager")
    ids = [model.src_tokenizer.encode(mask) for mask in CHARACTERS]
    assert len({row[-1] for row in ids}) == len(CHARACTERS)
    text = f"page {CHARACTERS[0]} auf {CHARACTERS[1]}{CHARACTERS[2]}a {CHARACTERS[70]}"
    assert model.tgt_tokenizer.decode(model.tgt_tokenizer.encode(text)) == text
    outputs = (run / "valid.output.txt").read_text().splitlines()
    assert len(outputs) == 10
    assert all("%s" in line for line in outputs)
    assert recorded_recipe(run).data.keep


def test_pairs_are_scored_with_the_masks_of_training(run: Path, model: Translator) -> None:
    """`score` and `evaluate` read the pieces themselves, which the net was not trained on."""
    pairs = [("open %s on page 3", "öffne %s auf Seite 3"), ("see X-12", "siehe"), ("a", "b")]
    sources, targets = map(list, zip(*pairs, strict=True))
    assert model.metadata.keep is not None
    masked = [mask_pair(*pair, model.metadata.keep.patterns) for pair in pairs]
    assert [pair in pairs for pair in masked] == [False, True, True]
    expected = [
        [tokenizer.encode_target(ids) for ids in tokenizer.encode_batch([*side])]
        for tokenizer, side in zip(
            (model.src_tokenizer, model.tgt_tokenizer), zip(*masked, strict=True), strict=True
        )
    ]
    assert [*model.pair_ids(sources, targets)] == expected
    assert model.score(sources, targets) == model.score(*map(list, zip(*masked, strict=True)))
    for pair, *sides in zip(pairs, *expected, strict=True):
        ids = read(model, *pair).ids  # what `inspect --target` shows
        assert [[*ids["source"]], [*ids["target"]][1:]] == [sides[0], sides[1][:-1]]
    rows = cache_folder() / str(facts_of_run(run).data) / "valid.jsonl"
    valid = [json.loads(line) for line in rows.read_text().splitlines()]
    forced = model.teacher_forced([row["src"] for row in valid], [row["tgt"] for row in valid])
    [*_, last] = [event for event in read_log(run / "log.jsonl") if isinstance(event, Evaluated)]
    assert forced["perplexity"] == pytest.approx(last.perplexity, rel=1e-4)


def test_lines_of_json_have_no_masks(run: Path, tmp_path: Path, commands: Any) -> None:
    """They had the source as the net read it, with private characters."""
    source = tmp_path / "source.txt"
    source.write_text("open %s on page 12\n")
    shown = commands.run("translate", str(run), "--input", str(source), "--json").out
    [line] = json.loads(shown)["outputs"]
    plain = ["text", "ids", "score", "log_prob", "finished", "failure", "reasons", "quality"]
    assert [*line] == plain
    assert count_masks(line["text"]).total() == 0


def test_alignments_count_a_piece_as_a_word(model: Translator) -> None:
    source = "open %s on page 12"
    [output] = model.generate(source, return_details=True, beam_size=1)
    ids = model.prompt_ids([source])
    [alignment] = align(model, ids, [output.ids], source_texts=[source], target_texts=["?"])
    assert alignment.source == ("open", "%s", "on", "page", "12")
    assert not any(character in CHARACTERS for word in alignment.target for character in word)


class Scripted:
    """Hypotheses of searches: the first, those of a wider beam, that with required masks."""

    def __init__(self, model: Translator, others: list[str], required: str) -> None:
        self.metadata, self.tgt_tokenizer = model.metadata, model.tgt_tokenizer
        self.others, self.required = others, required
        self.calls: list[str] = []
        self.prompt_ids = model.prompt_ids

    def generations(
        self, texts: list[str], options: Any, *, counts: list[Any]
    ) -> list[list[Generation]]:
        assert len(counts) == len(texts)
        self.calls.append("required" if options.require else "wider")
        found = [self.required] if options.require else self.others
        return [[generation(text) for text in found] for _ in texts]


def generation(text: str) -> Generation:
    return Generation(text, [1], 0.0, 0.0, True)


def kept(model: Any, texts: list[str], outputs: list[list[Generation]], options: Options) -> Any:
    """The outputs of texts with their pieces."""
    sources = [Source(text, model.metadata.keep, options.glossary) for text in texts]
    return kept_generations(model, sources, outputs, options)


A, B = CHARACTERS[64], CHARACTERS[0]  # %s and 5 of the source


@pytest.mark.parametrize(
    ("first", "others", "text", "calls", "num_reasons"),
    [
        (f"{A} ist {B}", [], "%s ist 5", [], 0),
        (f"{A} ist", [A, f"{B} ist {A}"], "5 ist %s", ["wider"], 0),
        ("a b", ["c"], "%s a b 5", ["wider"], 2),
        (f"{A} {A} {B} a", ["c"], "%s 5 a", ["wider"], 1),
        (f"{A}s ist {B}", ["c"], "%s s ist 5", ["wider"], 1),
        (f"{A} 1{B}", [f"{B}2 {A}"], "%s 1 5", ["wider"], 2),
    ],
)
def test_a_missing_piece_is_searched_for_and_then_placed(
    model: Translator,
    first: str,
    others: list[str],
    text: str,
    calls: list[str],
    num_reasons: int,
) -> None:
    scripted: Any = Scripted(model, others, "")
    [[output]] = kept(scripted, ["%s is 5"], [[generation(first)]], model.options())
    assert (output.text, scripted.calls) == (text, calls)
    assert len(output.reasons) == num_reasons


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_tokens": 9},  # a batch for each text
        {"glossary": {"page": "Seite|auf", "open": "öffne"}},
    ],
)
def test_texts_that_are_searched_again_together_have_the_outputs_of_each_alone(
    model: Translator, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was searched again alone, which took most of the time. A text that does not fit, or
    phrases that do not, end the search of no other text."""
    texts = ["open %s on page 12", "", "page 3 a", "open %s " * 200, "a", "see {n} 7", "open 3 %s"]
    keys: Any = {"too_long": "truncate", "return_details": True, "beam_size": 1, **options}
    alone = [model.translate(text, max_new_tokens=9, **keys) for text in texts]
    calls: list[int] = []
    search = model.generations

    def counted(rows: list[str], options: Any, **more: Any) -> list[list[Generation]]:
        calls.append(len(rows))
        return search(rows, options, **more)

    monkeypatch.setattr(model, "generations", counted)
    together = model.translate(texts, max_new_tokens=9, **keys)
    assert [[one.text for one in found] for found in together] == [
        [one.text for one in found] for found in alone
    ]
    assert [[one.reasons for one in found] for found in together] == [
        [one.reasons for one in found] for found in alone
    ]
    if "glossary" not in options:
        assert calls == [5]  # not of a blank text, and one that is too long for all its pieces
    searches = [*calls]
    calls.clear()
    reported: dict[int, list[Generation]] = {}

    def on_output(index: int, outputs: list[Generation]) -> None:
        assert index not in reported
        reported[index] = outputs

    assert model.translate(texts, max_new_tokens=9, on_output=on_output, **keys) == together
    assert [reported[index] for index in range(len(texts))] == together
    assert calls == searches  # each was searched again alone, and once more with the others


def test_what_cannot_be_kept_is_refused(
    run: Path, model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recorded_recipe(run)
    with pytest.raises(UserError, match="no regular expression"):
        recipe.replace({"data.keep_patterns": ["("]})
    with pytest.raises(UserError, match="no effect without keep"):
        recipe.replace({"data.keep": False})
    with pytest.raises(UserError, match="needs a token for each of its masks"):
        heedful.train(recipe.replace({"tokenizer.kind": "word"}), progress=False)
    with pytest.raises(UserError, match="complete before they are shown"):
        next(model.stream("a %s"))
    monkeypatch.setattr(model, "metadata", replace(model.metadata, keep=None))
    with pytest.raises(UserError, match=r"not trained with data\.keep"):
        model.translate("a", keep=True)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("~File", "Datei", "~Datei"),
        ("_File", "_Datei", "_Datei"),
        ("&Open file", "Datei öffnen", "Datei &öffnen"),
        ("Save ~As", "~Speichern ~unter", "~Speichern unter"),
        ("Pass~word", "Kennwort", "~Kennwort"),
        ("File", "Datei", "Datei"),
        ("A & B", "A & B", "A & B"),
        ("stat_type", "stat_typ", "stat_typ"),
        ("_Open ~/notes/a", "~/notes/a öffnen", "~/notes/a _öffnen"),
        ("&Save %1$s &amp; more", "%1$s &amp; mehr sichern", "%1$s &amp; mehr &sichern"),
        ("&Yes or &No", "&Ja oder &Nein", "&Ja oder &Nein"),
    ],
)
def test_one_accelerator_stays_one(source: str, target: str, expected: str) -> None:
    actual, reasons = with_accelerator(source, target)
    assert actual == expected or (source == "&Open file" and actual.count("&") == 1)
    assert not reasons


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [("~File", "12", "missing: ~"), ("&Yes or _No", "&Ja oder Nein", "missing: _")],
)
def test_accelerators_that_have_no_place_are_reviewed(
    source: str, target: str, reason: str
) -> None:
    assert with_accelerator(source, target) == (target, [reason])


@pytest.mark.parametrize(
    ("source", "target"),
    [("~5 minutes more", "noch ca. 5 Minuten"), ("5~10 files", "5 bis 10 Dateien")],
)
def test_signs_before_numbers_are_no_accelerators(source: str, target: str) -> None:
    """The sign was put before the first letter of the target."""
    assert with_accelerator(source, target) == (target, [])


def test_a_text_that_is_left_out_is_not_searched_for_and_stays_blank(model: Translator) -> None:
    text = "open %s " * 200
    options = {"too_long": "leave_out", "glossary": {"open": "auf"}, "return_details": True}
    model.failures.clear()
    [output] = model.generate(text, **options)
    assert (output.text, output.ids, output.reasons) == ("", [], ())


def test_a_text_that_is_cut_is_counted_once(model: Translator, monkeypatch: Any) -> None:
    monkeypatch.setattr(model, "num_truncated", 0)
    options: Any = {"too_long": "truncate", "max_new_tokens": 2, "return_details": True}
    [output] = model.generate("open %s " * 200, **options)
    assert output.reasons
    assert model.num_truncated == 1


def test_a_choice_of_texts_stays_and_is_reviewed(model: Translator) -> None:
    """Its syntax was broken without a reason."""
    choice = "{n, plural, one {# file} other {# files}}"
    [output] = model.generate(f"open {choice} 7", return_details=True, beam_size=1)
    assert output.text.count(choice) == 1
    assert f"a choice of texts that is not translated: {choice}" in output.reasons


def test_private_characters_of_a_source_are_not_lost(model: Translator) -> None:
    text = f"open {CHARACTERS[3]} on"
    [[output]] = kept(model, [text], [[generation(text)]], model.options())
    assert (output.text, output.reasons) == (text, ())


@pytest.mark.parametrize("output", ["{} siehe dort", "siehe {} dort", "siehe dort {}"])
def test_a_mask_that_is_removed_leaves_no_blank(output: str) -> None:
    text, reasons = place_masks(Keep().mask("see there"), output.replace("{}", CHARACTERS[70]))
    assert text == "siehe dort"
    assert len(reasons) == 1


def test_masks_are_placed_beside_spaces() -> None:
    source = Keep().mask("see %s in {a}")
    text, reasons = place_masks(source, "siehe dort")
    assert sorted(text.split(" ")) == sorted(["siehe", "dort", *source.pieces])
    assert len(reasons) == 2


@pytest.mark.parametrize(
    ("first", "others", "required", "text", "calls", "reasons"),
    [
        (f"offene Seite {A}", [], "", "offene Seite %s", [], ()),
        (f"Datei {A}", [f"die Seiten {A}"], "", "die Seiten %s", ["wider"], ()),
        (
            f"Datei {A}",
            ["b"],
            f"{A} Seite",
            "%s Seite",
            ["wider", "required", "required", "wider"],
            (),
        ),
        (
            f"x {A}",
            ["b"],
            "Seite",
            "x %s",
            ["wider", *["required"] * 4, "wider"],
            None,
        ),
    ],
)
def test_a_missing_term_is_searched_for_and_then_a_reason(
    model: Translator,
    first: str,
    others: list[str],
    required: str,
    text: str,
    calls: list[str],
    reasons: tuple[str, ...] | None,
) -> None:
    scripted: Any = Scripted(model, others, required)
    options = model.options(glossary={"file": "Seite|Seiten"})
    [[output]] = kept(scripted, ["open File %s"], [[generation(first)]], options)
    assert scripted.calls == calls
    if reasons is None:  # the output with the term, whose piece is placed
        assert output.text.split() in (["Seite", "%s"], ["%s", "Seite"])
        assert output.reasons == ("%s was missing and is placed by its position",)
    else:
        assert (output.text, output.reasons) == (text, reasons)


def test_terms_of_a_glossary(
    model: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "terms.tsv"
    path.write_text("page\tSeite auf|auf\n", encoding="utf-8")
    for options in ({}, {"beam_size": 1}, {"keep": False, "beam_size": 2}):
        [output] = model.generate(
            "open page 7", return_details=True, max_new_tokens=12, glossary=path, **options
        )
        has_term = bool(re.search(r"\bauf\b", output.text))
        assert has_term != ("the term page" in str(output.reasons))
        lacks = "not read, as the model's vocabulary lacks it: 7"
        assert output.reasons.count(lacks) == (options.get("keep") is False)
        assert 0 <= output.quality <= 100
    sampled = {"beam_size": 1, "temperature": 1.0, "seed": 1, "max_new_tokens": 3}
    [output] = model.generate("page", return_details=True, glossary=path, **sampled)
    assert output.reasons[-1] == "the term page is not always translated by Seite auf or auf"
    assert replace(output, text="a").quality == round(75 * output.probability, 1)
    path.write_text("page\tSeite 漢\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"terms.tsv, line 1: .* cannot write 'Seite 漢'.* no other"
    ):
        model.translate("a", glossary=path)
    with pytest.raises(UserError, match=r"line 1: its translation has the banned text 'uf'"):
        model.translate("a", glossary={"a": "auf"}, banned=["x", "uf"])
    with pytest.raises(UserError, match="with a glossary outputs are complete before"):
        next(model.stream("a", keep=False, glossary={"a": "a"}))
    monkeypatch.setattr(model, "metadata", replace(model.metadata, keep=None))
    text = f"page {CHARACTERS[3]} 漢"  # as any other characters, without `keep`
    [output] = model.generate(text, return_details=True, glossary={"page": "auf"})
    assert bool(re.search(r"\bauf\b", output.text)) != ("the term page" in str(output.reasons))


def test_terms_that_the_vocabulary_cannot_write_are_left_out(
    model: Translator, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them ended the command; each text with one has a reason."""
    wrong = {f"w{number}": f"Wort 漢{number}" for number in range(5)}
    terms = {"page": "auf|漢", "open page": "öffne 漢", **wrong}
    keys: Any = {"return_details": True, "max_new_tokens": 12, "glossary": terms}
    for _ in range(2):
        [plain], [long] = model.generate(["page", "open page w1 w1"], **keys)
        assert ("auf" in plain.text) != bool(plain.reasons)
        assert "漢" not in str(plain.reasons)
        assert [str(reason) for reason in long.reasons if "not required" in reason] == [
            "the term open page is not required: the model cannot write öffne 漢",
            "the term w1 is not required: the model cannot write Wort 漢1",
        ]
        assert "the term page is" not in str(long.reasons)  # the longest one counts
    [note] = caplog.messages
    assert note == (
        "note: the glossary: 6 terms are left out, as the model's vocabulary cannot write "
        "'öffne 漢' in line 2, 'Wort 漢0' in line 3, 'Wort 漢1' in line 4 and 3 more"
    )


def test_alignments_are_of_texts_with_their_pieces(model: Translator) -> None:
    """Their ranges are those of the text and of the output as a person reads them."""
    sources = [source for source in SOURCES if source]
    outputs = [best for best, *_ in model.translate(sources, return_details=True)]
    found = model.token_alignments([*sources, ""], [*outputs, replace(outputs[0], ids=[])])
    assert found.pop() is None
    for source, output, own in zip(sources, outputs, found, strict=True):
        assert own is not None
        assert own.weights.shape == (len(own.target), len(own.source))
        covered = {place for span in own.source for place in range(*span)}
        assert all(place in covered or char == " " for place, char in enumerate(source))
        ends = [end for start, end in own.target if start < end]
        assert ends == sorted(ends)
        assert max(ends, default=0) <= len(output.text.strip())
    assert heedful.ensemble([model]).token_alignments(sources[:1], outputs[:1]) == [None]


def test_alignments_of_a_masked_term_are_those_of_its_words(model: Translator) -> None:
    """The text that the net read had a mask for the term, which alignments did not know."""
    text, glossary = "open page 12 %s", model.options(glossary={"page": "Seite auf"}).glossary
    source = Source(text, model.metadata.keep, glossary)
    masked = source.with_masked_terms(generation("öffne"))
    [term] = set(masked.pieces) - set(source.masked.pieces)
    tokenizer = model.tgt_tokenizer
    assert masked.text.split()[1] == term
    written = masked.text.replace("open", "öffne")
    output = replace(generation(written), ids=tokenizer.encode(written))
    output = source.restored(source.with_terms(output, masked))
    assert (output.text, output.reasons) == ("öffne Seite auf 12 %s", ())
    [found] = model.token_alignments([text], [output])
    assert found is not None
    assert "page" in {text[slice(*span)].strip() for span in found.source}
    assert "Seite auf" in {output.text[slice(*span)].strip() for span in found.target}
    [links] = align_outputs(model, [text], [output], model.options())
    assert (links.source[1], links.target[1]) == ("page", "Seite auf")


def test_a_single_tag_of_a_document_is_a_piece(model: Translator) -> None:
    page = b"<p>Open <code>x y</code> on <b>page</b> 12 a</p><p>no <b>piece</b></p>"
    seen: list[str] = []

    class Seen:
        """The model, with the texts that it read."""

        metadata = model.metadata

        def translate(self, texts: list[str], **options: Any) -> Any:
            """As of the model."""
            seen.extend(texts)
            return model.translate(texts, **options)

    for keep, text in ((True, "Open <x1/> on page 12 a"), (False, "Open on page 12 a")):
        seen.clear()
        document = read_document(page, "a.html", ("en", "de"))
        translate_document(Seen(), document, beam_size=1, max_new_tokens=9, keep=keep)
        assert text in seen
        assert document.to_bytes().count(b"<code>x y</code>") == 1
        assert document.to_bytes().count(b"<b>") == document.to_bytes().count(b"</b>") == 2
