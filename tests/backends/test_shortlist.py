"""Shortlists: IBM Model 1 against its definition, required ids, files."""

import json
import math
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from backend_models import TEXTS, VOCAB, model_of
from heedful.backends import shortlist
from heedful.backends.base import Settings
from heedful.backends.ctranslate2.vocabulary import write_vocabulary_map
from heedful.backends.manifest import FOLDER, SHORTLIST, Manifest, conversion_path, sha256_of
from heedful.backends.registry import open_conversion
from heedful.backends.shortlist import Shortlist, make_shortlist
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.convert import convert_model
from heedful.deploy.optimize import Findings, _Converter
from heedful.deploy.prove import Prover
from heedful.errors import UserError
from heedful.generation import beam_search
from heedful.pipelines import load
from heedful.pipelines.loading import tokenizer_files

PAIRS = [([0, 1], [0, 1, 1]), ([0, 2], [0, 2]), ([1], [1]), ([2, 2, 0], [3, 2, 0])]


def model_1(pairs: list[tuple[list[int], list[int]]], rounds: int) -> dict[tuple[int, int], float]:
    """By the definition: loops over alignments, probabilities of each source word; 9 is the empty
    word."""
    with_empty = [([*source, 9], target) for source, target in pairs]
    together = {link for source, target in with_empty for link in product(source, target)}
    chance = {link: 1 / sum(other[0] == link[0] for other in together) for link in together}
    for _ in range(rounds):
        expected = dict.fromkeys(together, 0.0)
        for source, target in with_empty:
            for word in target:
                total = math.fsum(chance[s, word] for s in source)
                for s in source:
                    expected[s, word] += chance[s, word] / total
        of = {s: math.fsum(v for (o, _), v in expected.items() if o == s) for s, _ in together}
        chance = {link: value / of[link[0]] for link, value in expected.items()}
    return chance


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_em_equals_ibm_model_1(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "_CHUNK", chunk)
    codes, chance = shortlist._translations(PAIRS, source_size=9, target_size=4)
    actual = {divmod(int(code), 4): value for code, value in zip(codes, chance, strict=True)}
    assert actual == pytest.approx(model_1(PAIRS, shortlist.ITERATIONS))


def test_lists_have_probable_frequent_and_required_ids() -> None:
    shortlist = make_shortlist(PAIRS, 9, 6, always=[5], num_frequent=1, num_translations=1)
    assert shortlist.always.tolist() == [0, 5]  # token 0 and 1 are equally frequent: the first
    assert [shortlist.translations(source).tolist() for source in range(4)] == [[0], [1], [2], []]
    assert shortlist.allowed_ids([1, 1, 2]).tolist() == [0, 1, 2, 5]
    assert shortlist.recall(PAIRS) == pytest.approx(8 / 9)  # all but token 3
    assert make_shortlist(PAIRS, 9, 6, shared=True, num_translations=1).translations(
        3
    ).tolist() == [3]
    assert make_shortlist(PAIRS, 9, 6, num_frequent=9, num_translations=9).recall(PAIRS) == 1
    with pytest.raises(UserError, match="the model has none"):
        make_shortlist([([], [1])], 9, 6)


def test_saved_shortlists_are_equal_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    shortlist, path = make_shortlist(PAIRS, 9, 6), tmp_path / "list.safetensors"
    shortlist.save(path, "ours")
    again = Shortlist.load(path, "ours")
    assert all(
        np.array_equal(shortlist.translations(source), again.translations(source))
        for source in range(9)
    )
    assert np.array_equal(shortlist.always, again.always)
    with pytest.raises(UserError, match="other tokenizers than the model's"):
        Shortlist.load(path, "theirs")
    Shortlist(shortlist.always, shortlist.starts, shortlist.tokens + 6, 6).save(path, "ours")
    with pytest.raises(UserError, match="do not fit"):
        Shortlist.load(path, "ours")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="is damaged, or not a shortlist"):
        Shortlist.load(path, "ours")


def test_the_vocabulary_map_of_ctranslate2_has_token_names() -> None:
    shortlist = Shortlist(np.array([0]), np.array([0, 2, 2]), np.array([1, 2]), 3)
    assert list(shortlist.vocabulary_map(["a", "b"], ["x", "y", "z"])) == ["\tx\n", "a\ty z\n"]


@pytest.mark.parametrize("options", [{"beam_size": 1}, {"beam_size": 3, "num_return": 2}])
def test_eager_search_uses_only_the_listed_tokens(options: dict[str, int]) -> None:
    """Equal to a search without a cache, source by source, with a softmax over its list."""
    model = model_of("vaswani2017")
    [start], [end] = model.ids.decoder_start_ids, model.ids.eos_ids
    starts = np.arange(0, 4 * VOCAB + 1, 4)
    samples = np.random.default_rng(1).integers(4, VOCAB, 4 * VOCAB)
    model.shortlist = shortlist = Shortlist(np.array([end, 3]), starts, samples, VOCAB)
    rows = [[5, 6, 7, 8, 2], [9, 2], [5, 12, 2]]
    request = model.request(rows, max_new_tokens=7, **options)
    actual = model.eager.outputs(rows, request)
    for row, outputs in zip(rows, actual, strict=True):
        words = torch.tensor(shortlist.allowed_ids(row))

        def listed_log_probs(
            prefixes: torch.Tensor, row: list[int] = row, words: torch.Tensor = words
        ) -> torch.Tensor:
            logits = model.net(torch.tensor([row] * len(prefixes)), prefixes)[:, -1]
            every = torch.full_like(logits, -torch.inf)
            every[:, words] = logits[:, words]
            return every.log_softmax(-1)

        with torch.no_grad():
            expected = beam_search(
                listed_log_probs, [[start]], eos_id=end, max_new_tokens=7,
                stop="beam_full" if options["beam_size"] == 1 else "optimal",
                force_eos=False, **options,
            )[0]  # fmt: skip
        assert [one.ids for one in outputs] == [one.ids for one in expected]
        assert [one.score for one in outputs] == pytest.approx([one.score for one in expected])
        assert {token for one in outputs for token in one.ids} <= set(words.tolist())
    request = model.request(rows, max_new_tokens=7, shortlist=False, **options)
    free = model.eager.outputs(rows, request)
    assert [one[0].ids for one in free] != [one[0].ids for one in actual]


def test_ctranslate2_outputs_equal_eager_with_the_same_list(tmp_path: Path) -> None:
    """For single rows: in a batch CTranslate2 allows the lists of all sources."""
    model = model_of("vaswani2017")
    facts = convert_model(model, tmp_path, "float32")
    marks = {model.tokenizer.unk_id, model.tokenizer.bos_id, model.tokenizer.eos_id}
    always = np.array(sorted(marks))  # it puts them on every list
    shortlist = Shortlist(always, np.arange(0, 201, 5), np.arange(200) % 37 + 3, 40)
    write_vocabulary_map(shortlist, conversion_path(tmp_path, "ctranslate2", "float32"))
    model.shortlist = shortlist
    backend = open_conversion(tmp_path, tmp_path, "ctranslate2", "float32", facts, Settings(1))
    differ = 0
    for row in np.random.default_rng(0).integers(6, 40, (6, 4)).tolist():
        request, free = (
            model.request([row], beam_size=1, max_new_tokens=9, shortlist=use_list)
            for use_list in (True, False)
        )
        [[ours]], [[reference]] = (
            model.eager.outputs([row], request),
            backend.outputs([row], request),
        )
        assert ours.ids == reference.ids
        assert ours.log_prob == pytest.approx(reference.log_prob, abs=1e-3)
        assert [
            token for run, _ in backend.stream_tokens(row, request) for token in run
        ] == ours.ids
        [[without]] = backend.outputs([row], free)
        assert without.ids == model.eager.outputs([row], free)[0][0].ids
        differ += without.ids != ours.ids
    assert differ


def test_a_model_is_opened_only_with_its_own_shortlist(tmp_path: Path) -> None:
    model = model_of("vaswani2017")
    model.save(tmp_path)
    assert load(tmp_path).shortlist is None
    size = model.tokenizer.vocab_size
    shortlist, path = make_shortlist(PAIRS, size, size), tmp_path / FOLDER / SHORTLIST
    path.parent.mkdir()
    shortlist.save(path, sha256_of(tokenizer_files(tmp_path)))
    assert (
        load(tmp_path).eager.shortlist.allowed_ids([1]).tolist()
        == shortlist.allowed_ids([1]).tolist()
    )
    # Trained on other text, with the same number of tokens.
    other = train_tokenizer(["other words"], kind="char", vocab_size=None)
    other.save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="make it again"):
        load(tmp_path)


def test_required_phrases_are_in_every_list() -> None:
    model = model_of("vaswani2017")
    marks = np.array([model.tokenizer.eos_id])
    nothing = np.zeros(41, np.int64)
    model.shortlist = Shortlist(marks, nothing, np.array([], np.int64), 40)
    request = model.request([[6, 7, 8]], require=[[30, 31]], beam_size=2, max_new_tokens=6)
    [[best, *_]] = model.eager.outputs([[6, 7, 8]], request)
    assert (30, 31) in pairwise(best.ids)
    assert math.isfinite(best.log_prob)


def test_counted_tokens_are_in_the_list_of_their_text() -> None:
    """Without them no output could end, so that a search for missing pieces found none."""
    model = model_of("vaswani2017")
    end = model.tokenizer.eos_id
    nothing = np.zeros(41, np.int64)
    model.shortlist = Shortlist(np.array([end]), nothing, np.array([], np.int64), 40)
    rows = [[6, 7, 8], [9]]
    request = model.request(rows, beam_size=2, max_new_tokens=6)
    request = request._replace(counts=[{(30, 31): 2, (32,): 0}, {(33,): 1}])
    [[first, *_], [second, *_]] = model.eager.outputs(rows, request)
    assert {*first.ids[:2]} <= {30, 31}
    assert (first.ids[2:], second.ids) == ([end], [33, end])


def test_a_shortlist_that_a_backend_does_not_support_runs_eager(tmp_path: Path) -> None:
    model = model_of("vaswani2017")
    model.save(tmp_path)
    facts = convert_model(model, tmp_path, "float32")
    place = conversion_path(tmp_path, "ctranslate2", "float32")
    names = json.loads((place / "shared_vocabulary.json").read_text(encoding="utf-8"))
    names[7] = "of one"
    (place / "shared_vocabulary.json").write_text(json.dumps(names), encoding="utf-8")
    findings = Findings(Manifest.new(tmp_path, "Translator"))
    forms = {("ctranslate2", "float32"): facts}
    converter = _Converter(model, tmp_path, tmp_path, 100, findings, forms)
    assert converter.shortlist(PAIRS, Prover(model, TEXTS)) is model.shortlist is not None
    assert "blanks" in findings.refused["a shortlist in ctranslate2"]
