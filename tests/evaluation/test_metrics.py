"""Metrics: hand-computed values, sacreBLEU's own values, an independent count of multi-bleu."""

import json
import math
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF, TER
from sacremoses import MosesTokenizer

from heedful import extras, plugins
from heedful.errors import UserError
from heedful.evaluation.metrics import (
    corpus_scores,
    exact_match,
    metric_problem,
    perplexity,
    sentence_chrf,
    split_at_spaces,
    tokenized_lowercase_bleu,
)

METRICS = plugins.metric.names()
HYPOTHESES = [
    "Ein Mann, der ein Fahrrad fährt, lächelt.",
    "Zwei Hunde spielen im Schnee",
    'Eine Frau (links) sagt: "Das ist\'s!" & geht.',
]
REFERENCES = [
    "Ein Mann auf einem Fahrrad, der lächelt.",
    "Zwei braune Hunde spielen im tiefen Schnee .",
    'Eine Frau (links) sagt: "Das ist\'s!" & lacht.',
]


def multi_bleu(
    hypotheses: list[list[str]], references: list[list[str]]
) -> tuple[float, list[float]]:
    """BLEU-4 of Papineni et al.

    2002 on tokens, one reference, no smoothing, with its precisions.
    """
    precisions = []
    for n in range(1, 5):
        matched = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours = Counter(tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1))
            reference_counts = Counter(
                tuple(reference[i : i + n]) for i in range(len(reference) - n + 1)
            )
            matched += (ours & reference_counts).total()
            total += ours.total()
        precisions.append(matched / total if total else 0.0)
    if min(precisions) == 0:
        return 0.0, precisions
    length, target = sum(map(len, hypotheses)), sum(map(len, references))
    brevity = 1.0 if length >= target else math.exp(1 - target / length)
    return 100 * brevity * math.prod(precisions) ** 0.25, precisions


def test_scores_and_signatures_equal_sacrebleu() -> None:
    scores = corpus_scores(
        HYPOTHESES, REFERENCES, tgt_language="de", metrics=("bleu", "chrf", "chrf++", "ter")
    )
    for name, metric in {
        "bleu": BLEU(),
        "chrf": CHRF(),
        "chrf++": CHRF(word_order=2),
        "ter": TER(),
    }.items():
        expected = metric.corpus_score(HYPOTHESES, [REFERENCES])
        assert scores[name].value == expected.score
        assert scores[name].name == expected.name
        assert scores[name].signature == str(metric.get_signature())


def test_sentence_chrf_scores_each_line_against_its_reference() -> None:
    expected = [
        CHRF().corpus_score([line], [[reference]]).score
        for line, reference in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    assert sentence_chrf(HYPOTHESES, REFERENCES) == pytest.approx(expected)
    assert sentence_chrf(["", "", "a"], [" ", "a", ""]) == [
        100,
        0,
        0,
    ]  # right: not one of the worst
    assert len(set(expected)) == len(HYPOTHESES)


def test_case_insensitive_scores_equal_sacrebleu() -> None:
    small = [line.lower() for line in HYPOTHESES]
    names = ("bleu", "chrf", "ter", "exact_match")
    scores = corpus_scores(small, REFERENCES, tgt_language="de", metrics=names, lowercase=True)
    for name, metric in {
        "bleu": BLEU(lowercase=True),
        "chrf": CHRF(lowercase=True),
        "ter": TER(case_sensitive=False),
    }.items():
        assert scores[name].value == metric.corpus_score(small, [REFERENCES]).score
        assert scores[name].signature == str(metric.get_signature())
    assert scores["exact_match"].signature == "case:lc|space:normalized"
    assert corpus_scores(small, HYPOTHESES, metrics=names, lowercase=True)["exact_match"].value == 1
    upper = [line.upper() for line in small]
    assert sentence_chrf(small, upper, lowercase=True) == pytest.approx([100] * len(small))


@pytest.mark.parametrize(
    ("references", "metrics", "is_named"),
    [
        (["今天天气很好。"], ["chrf", "bleu"], True),
        (["きょうはいい天気です", "a b"], ["ter"], True),
        (["今天天气很好。"], ["chrf", "exact_match"], False),
        (["USB 线 is in"], ["bleu"], False),
        (["12", "…"], ["bleu"], False),
    ],
)
def test_scores_that_split_texts_without_spaces_are_named(
    references: list[str], metrics: list[str], is_named: bool
) -> None:
    assert ("few long words" in split_at_spaces(references, metrics)) == is_named


def test_details_by_hand() -> None:
    scores = corpus_scores(["a b c d x"], ["a b c d e"], metrics=["bleu", "ter"])
    assert scores["bleu"].details["precisions"] == pytest.approx([80, 75, 200 / 3, 50])
    assert scores["bleu"].details["brevity_penalty"] == 1.0
    assert scores["ter"].details == {"num_edits": 1, "reference_length": 5}


@pytest.mark.parametrize("code", ["zh", "zh-CN", "zh_Hans", "cmn", "zho", "ZH"])
def test_chinese_is_tokenized_by_character(code: str) -> None:
    hypotheses, references = ["我今天去学校了。"], ["我昨天去学校了。"]
    scores = corpus_scores(hypotheses, references, tgt_language=code)
    assert "tok:zh" in scores["bleu"].signature
    assert scores["bleu"].value == BLEU(tokenize="zh").corpus_score(hypotheses, [references]).score
    assert 0 < scores["bleu"].value < 100
    assert "asian:yes" in scores["ter"].signature
    assert scores["ter"].value == pytest.approx(100 / 8)  # one character of eight


@pytest.mark.parametrize("code", ["ja", "jpn", "ja-JP", "ko", "kor", "de"])
def test_ter_counts_characters_in_japanese_and_words_elsewhere(code: str) -> None:
    hypotheses, references = ["今日は学校へ行く。 yes"], ["昨日は学校へ行く。 yes"]
    is_japanese = code.startswith("j")
    expected = TER(normalized=is_japanese, asian_support=is_japanese)
    score = corpus_scores(hypotheses, references, tgt_language=code, metrics=["ter"])["ter"]
    assert score.value == expected.corpus_score(hypotheses, [references]).score
    assert score.signature == str(expected.get_signature())


@pytest.mark.parametrize(("code", "short"), [("zho", "zh"), ("jpn", "ja"), ("kor", "ko")])
def test_codes_of_three_letters_are_tokenized_as_those_of_two(code: str, short: str) -> None:
    def outcome(language: str) -> object:
        try:
            return corpus_scores(["我 a"], ["我 b"], tgt_language=language, metrics=["bleu"])
        except UserError as error:  # the tokenizer's package is not there
            return str(error)

    assert outcome(code) == outcome(short) != outcome("de")


@pytest.mark.parametrize(("code", "package"), [("ja", "MeCab"), ("ko-KR", "mecab_ko")])
def test_bleu_without_the_languages_tokenizer_is_known_before_the_work(
    code: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != package)
    problem = metric_problem("bleu", code)
    assert problem is not None
    assert f"pip install 'sacrebleu[{code[:2]}]'" in problem
    assert metric_problem("bleu", "de") is metric_problem("chrf", code) is None
    with pytest.raises(UserError, match=package):
        corpus_scores(["a"], ["a"], tgt_language=code)


def test_exact_match_ignores_only_whitespace() -> None:
    hypotheses = ["2024-01-02", " a \t b\n", "A", "x.", "", "é"]
    references = ["2024-01-02", "a b", "a", "x", "", "e\u0301"]
    score = exact_match(hypotheses, references)
    assert score.value == 3 / 6
    assert score.details == {"num_equal": 3, "num_segments": 6}


def test_tokenized_lowercased_bleu_against_an_independent_count() -> None:
    tokenizer = MosesTokenizer("de")

    def tokens(lines: list[str], escape: bool) -> list[list[str]]:
        return [tokenizer.tokenize(line.lower(), escape=escape) for line in lines]

    score = tokenized_lowercase_bleu(HYPOTHESES, REFERENCES, "de")
    for escape in (True, False):  # multi-bleu is usually run on escaped tokens
        expected, precisions = multi_bleu(tokens(HYPOTHESES, escape), tokens(REFERENCES, escape))
        assert score.value == pytest.approx(expected)
        assert score.details["precisions"] == pytest.approx([100 * p for p in precisions])
    assert score.details["brevity_penalty"] < 1
    assert score.name == "tokenized lowercased BLEU"
    assert "case:lc|tok:moses-de|smooth:none" in score.signature
    assert score.value != corpus_scores(HYPOTHESES, REFERENCES, metrics=["bleu"])["bleu"].value


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.lists(st.sampled_from("abAB"), max_size=9)] * 2), min_size=1, max_size=4
    )
)
def test_tokenized_lowercased_bleu_is_multi_bleu(pairs: list[tuple[list[str], list[str]]]) -> None:
    hypotheses = [" ".join(hypothesis) for hypothesis, _ in pairs]
    references = [" ".join(reference) for _, reference in pairs]
    expected, _ = multi_bleu(
        [h.lower().split() for h in hypotheses], [r.lower().split() for r in references]
    )
    score = tokenized_lowercase_bleu(hypotheses, references, "en")
    assert score.value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_the_direction_of_a_metric_ranks_perfect_output_first(name: str) -> None:
    perfect, bad = (
        corpus_scores(lines, REFERENCES, tgt_language="de", metrics=[name])[name].value
        for lines in (REFERENCES, ["x y", "x y z", "x"])
    )
    assert (perfect > bad) == plugins.metric.get(name).higher_is_better


def test_identical_lines_have_perfect_scores_and_case_counts_by_default() -> None:
    metrics = ("bleu", "chrf", "chrf++", "ter", "exact_match", "tokenized_lowercase_bleu")
    assert set(metrics) == set(METRICS)
    values = corpus_scores(REFERENCES, REFERENCES, tgt_language="de", metrics=metrics).values()
    assert values.pop("ter") == 0
    assert values.pop("exact_match") == 1
    assert list(values.values()) == pytest.approx([100] * 4)
    upper = [line.upper() for line in REFERENCES]
    values = corpus_scores(upper, REFERENCES, tgt_language="de", metrics=metrics).values()
    assert values["tokenized_lowercase_bleu"] == pytest.approx(100)
    assert values["exact_match"] == 0
    assert values["bleu"] < 50


def test_to_dict_can_be_serialized_as_json() -> None:
    scores = corpus_scores(HYPOTHESES, REFERENCES, tgt_language="de", metrics=METRICS)
    record = json.loads(json.dumps(scores.to_dict(), allow_nan=False))
    assert record["num_segments"] == 3
    assert list(record["scores"]) == list(METRICS)
    for metric, entry in record["scores"].items():
        assert entry["score"] == scores[metric].value
        assert entry["signature"] == scores[metric].signature != ""


def test_perplexity() -> None:
    assert perplexity(10 * math.log(7), 10) == pytest.approx(7)
    assert perplexity(0, 3) == 1
    assert perplexity(1e6, 1) == math.inf
    with pytest.raises(UserError, match="no target tokens"):
        perplexity(0.0, 0)


@pytest.mark.parametrize(
    ("hypotheses", "references", "options", "message"),
    [
        (["a"], ["a", "b"], {}, "1 lines of output but 2 reference lines"),
        ([], [], {}, "no lines to score"),
        (["a"], ["a"], {"metrics": ["blue"]}, "did you mean bleu"),
        (["a"], ["a"], {"metrics": ["tokenized_lowercase_bleu"]}, "needs the target language"),
        (
            ["我"],
            ["我"],
            {"metrics": ["tokenized_lowercase_bleu"], "tgt_language": "zh"},
            "without spaces between words",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    hypotheses: list[str], references: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        corpus_scores(hypotheses, references, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_importing_metrics_imports_no_scorer() -> None:
    code = (
        "import sys, heedful.evaluation.metrics;"
        " print([m for m in ('sacrebleu', 'sacremoses', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
