"""Language tags in one form, for filters, metrics, models and the server."""

import pytest

from heedful.data.language_codes import M2M100, MBART50, NLLB
from heedful.data.language_tags import language_of, macrolanguage_of, matching_tag, standard_tag
from heedful.data.languages import language_probabilities, scripts_of


@pytest.mark.parametrize(
    ("tag", "standard", "language", "macrolanguage"),
    [
        ("pt_BR", "pt-BR", "pt", "pt"),
        ("por", "pt", "pt", "pt"),
        ("PT-br", "pt-BR", "pt", "pt"),
        ("zh_Hans", "zh-Hans", "zh", "zh"),
        ("cmn", "zh", "zh", "zh"),
        ("yue", "yue", "yue", "zh"),
        ("nb", "nb", "nb", "no"),
        ("nob", "nb", "nb", "no"),
        ("no", "no", "no", "no"),
        ("hr-HR", "hr-HR", "hr", "sh"),
        ("deu", "de", "de", "de"),
        ("ger", "de", "de", "de"),
        ("my tag", "my tag", "my tag", "my tag"),
    ],
)
def test_a_language_is_the_same_however_its_tag_is_written(
    tag: str, standard: str, language: str, macrolanguage: str
) -> None:
    assert (standard_tag(tag), language_of(tag)) == (standard, language)
    assert macrolanguage_of(tag) == macrolanguage


def test_a_tag_matches_the_one_of_the_same_meaning_or_language() -> None:
    tags = ["pt_BR", "pt_PT", "zh_Hans", "deu"]
    assert matching_tag("pt-br", tags) == "pt_BR"
    assert matching_tag("pt", tags) is None  # there are two
    assert matching_tag("cmn", tags) == "zh_Hans"
    assert matching_tag("de-AT", tags) == "deu"
    assert matching_tag("fr", tags) is None
    assert matching_tag("my tag", tags) is None


@pytest.mark.parametrize(
    ("tag", "tags", "expected"),
    [
        ("no", ["nb"], "nb"),
        ("nb", ["no"], "no"),
        ("nb-NO", ["nn", "no"], "no"),
        ("no", ["nn_NO", "nb_NO"], "nb_NO"),
        ("no", ["nb", "no", "nn"], "no"),
        ("nb", ["no", "nb_NO"], "nb_NO"),
        ("nn", ["nb", "no"], None),
        ("no", ["nn", "da"], None),
        ("sh", ["sr_Cyrl", "sr_Latn"], "sr_Latn"),
        ("sr-Latn", ["sh", "sr"], "sh"),
        ("sr", ["sh", "sr_Cyrl"], "sr_Cyrl"),
        ("hr", ["sh"], None),
        ("fil", ["tl"], "tl"),
        ("tgl", ["fil"], "fil"),
        ("id", ["ms", "in"], "in"),
        ("ms", ["id"], None),
        ("zsm", ["id", "ms"], "ms"),
        ("he", ["iw"], "iw"),
        ("yi", ["ji"], "ji"),
        ("zh", ["yue", "cmn"], "cmn"),
        ("fa", ["prs", "pes"], "pes"),
    ],
)
def test_former_and_macro_codes_are_the_language_that_is_meant(
    tag: str, tags: list[str], expected: str | None
) -> None:
    assert matching_tag(tag, tags) == expected


def test_a_language_without_script_is_in_its_usual_one() -> None:
    """By the codes of NLLB, M2M100 and mBART-50."""
    for tag, expected in {
        "zh": "zho_Hans",
        "zh-CN": "zho_Hans",
        "zh-TW": "zho_Hant",
        "cmn_Hant": "zho_Hant",
        "ar": "arb_Arab",
        "sr": "srp_Cyrl",
        "de": "deu_Latn",
        "en-GB": "eng_Latn",
        "fa": "pes_Arab",
        "no": "nob_Latn",
        "nb": "nob_Latn",
        "nn": "nno_Latn",
        "sw": "swh_Latn",
        "tlh": None,
    }.items():
        assert matching_tag(tag, NLLB) == expected, tag
    assert matching_tag("deu", MBART50) == "de_DE"
    assert matching_tag("zh_Hant", MBART50) == "zh_CN"  # the only Chinese
    assert matching_tag("por", M2M100["m2m100"]) == "pt"


def test_scripts_are_those_of_the_language_of_any_tag() -> None:
    for tag in ("cmn", "zho", "zh_Hans_CN"):
        assert scripts_of(tag, None, "src_script") == ["Han"]
    assert scripts_of("rus", None, "src_script") == ["Cyrillic"]


@pytest.mark.parametrize(
    ("text", "languages", "expected"),
    [
        (
            "Jeg vet ikke hva du mener med det, men vi kan snakke om det i morgen.",
            ["nb", "sv"],
            "nb",
        ),
        ("Não sei o que você quer dizer com isso.", ["es", "pt_BR", "it"], "pt_BR"),
        ("Não sei o que você quer dizer com isso.", ["spa", "por"], "por"),
        ("我不知道你这是什么意思。", ["ja", "zh_Hans"], "zh_Hans"),
        ("我不知道你这是什么意思。", ["jpn", "cmn"], "cmn"),
        ("Jeg vet ikke hva du mener med det.", ["nn", "nb", "sv"], "nb"),
        ("Eg veit ikkje kva du meiner med det, men vi kan snakke om det.", ["nn", "no"], "nn"),
    ],
)
def test_a_language_is_detected_whatever_tag_a_model_has_for_it(
    text: str, languages: list[str], expected: str
) -> None:
    from heedful.serve.languages import detect

    found = detect(text, languages)
    assert found[0][0] == expected
    assert found[0][1] > 0.5
    assert {code for code, _ in found} == {*languages}
    members = [
        probability
        for code, probability in language_probabilities(text).items()
        if macrolanguage_of(code) == macrolanguage_of(expected)
    ]
    assert found[0][1] == pytest.approx(sum(members))


def test_names_are_found_for_any_tag() -> None:
    from heedful.serve.languages import name_of

    assert [name_of(tag) for tag in ("pt_BR", "por", "nb", "cmn", "xx1")] == [
        "Portuguese", "Portuguese", "Norwegian Bokmål", "Chinese", "xx1",
    ]  # fmt: skip


def test_scores_use_the_tokenization_of_the_language_of_any_tag() -> None:
    from heedful.evaluation.metrics import corpus_scores

    for tag in ("zh", "cmn", "zho", "zh_Hans", "yue"):
        scores = corpus_scores(
            ["我不知道"], ["我不知道"], tgt_language=tag, metrics=["bleu", "ter"]
        )
        assert "tok:zh" in scores["bleu"].signature
        assert "asian:yes" in scores["ter"].signature


def test_a_target_language_is_found_by_any_tag() -> None:
    from dataclasses import replace

    from backend_models import model_of
    from heedful.errors import UserError
    from heedful.options import Options

    model = model_of("vaswani2017")
    model.metadata = replace(model.metadata, tgt_language="por")
    plain = model.prompt_ids(["the cat"])
    assert model.prompt_ids(["the cat"], Options(tgt_language="pt_BR")) == plain
    with pytest.raises(UserError, match="no tgt_language es"):
        model.prompt_ids(["the cat"], Options(tgt_language="es"))
