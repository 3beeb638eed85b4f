"""Saved models: equal after loading, with outputs that depend on nothing else."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import heedful
from backend_models import model_of
from commands import tiny, tree
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.run import train

TEXTS = ["1 2 3", "0", "5 5 5 5 5", "", "2 4", "3 1 0 2", "  ", "4 4 1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    # 60 steps: far from perfect, so that the hypotheses of a beam differ.
    train(parse_recipe(tiny(training__max_steps=60, training__evaluate_every=30)), out)
    return out


@pytest.fixture(scope="module")
def model(folder):
    return heedful.load(folder, device="cpu")


# --- saving and loading ---------------------------------------------------------------------


def test_saving_a_loaded_model_writes_equal_files(model, folder, tmp_path):
    model.save(tmp_path / "a")
    again = heedful.load(tmp_path / "a", device="cpu")
    again.save(tmp_path / "b")
    assert not again.net.training
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json"}
    for name, content in files.items():
        assert content == (folder / name).read_bytes()


def test_saving_is_atomic_and_replaces_only_models(model, tmp_path, monkeypatch):
    """By a path or its text: an interrupted save leaves the older model unchanged."""
    model.save(str(tmp_path / "a"))
    before = tree(tmp_path)

    def fails(*args, **keys):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("heedful.zoo.saved.save_file", fails)
        for name in ("a", "new"):
            with pytest.raises(UserError, match="No space left on device"):
                model.save(tmp_path / name)
    assert tree(tmp_path) == before
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis\.tex"):
        model.save(tmp_path / "a")


def test_a_joint_tokenizer_is_one_object_and_two_are_separate(model, tmp_path):
    assert model.src_tokenizer is model.tgt_tokenizer
    recipe = tiny(tokenizer__joint=False, training__max_steps=1, task="sort")
    train(parse_recipe(recipe), tmp_path / "two")
    two = heedful.load(tmp_path / "two", device="cpu")
    assert two.src_tokenizer is not two.tgt_tokenizer
    assert {"tokenizer.src.json", "tokenizer.tgt.json"} <= {
        path.name for path in (tmp_path / "two").iterdir()
    }
    assert two.config.tie_embeddings == "decoder"


def test_tied_tensors_are_saved_once_and_loaded_tied(model, folder):
    saved = load_file(folder / "model.safetensors")
    assert model.config.tie_embeddings == "all"
    embedding = [name for name, t in saved.items() if t.shape[0] == model.src_tokenizer.vocab_size]
    assert len(embedding) == 1
    total = sum(tensor.numel() for tensor in saved.values())
    assert total == sum(parameter.numel() for parameter in model.net.parameters())
    net = model.net
    assert net.head.out.weight is net.src_embedding.tokens.weight
    assert net.head.out.weight is net.tgt_embedding.tokens.weight


def test_loading_uses_no_random_numbers(folder):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    heedful.load(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_metadata_describe_the_training(folder):
    metadata = json.loads((folder / "config.json").read_text())
    assert metadata["architecture"] == "vaswani2017"
    assert metadata["task"] == "copy"
    assert metadata["heedful"] == heedful.__version__
    assert metadata["model"]["d_model"] == 16
    assert "dropout" in metadata["model"]
    assert "max_length" in metadata["model"]


# --- translating ----------------------------------------------------------------------------

texts = st.lists(
    st.lists(st.sampled_from("012345"), max_size=8).map(" ".join), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), lines=texts, beam=st.integers(1, 3), batch_tokens=st.integers(1, 60))
def test_a_batch_equals_single_lines_in_any_order(model, data, lines, beam, batch_tokens):
    options = {"beam_size": beam, "num_return": beam}
    together = model.generate(lines, batch_tokens=batch_tokens, **options, return_details=True)
    alone = [model.generate([line], **options, return_details=True)[0] for line in lines]
    order = data.draw(st.permutations(range(len(lines))))
    permuted = model.generate(
        [lines[i] for i in order], batch_tokens=999, **options, return_details=True
    )
    for index, line in enumerate(lines):
        for other in (alone[index], permuted[order.index(index)]):
            assert [t.ids for t in together[index]] == [t.ids for t in other], line
            assert [t.finished for t in together[index]] == [t.finished for t in other]
            assert [t.score for t in together[index]] == pytest.approx(
                [t.score for t in other], abs=1e-4
            )


def test_translate_returns_the_best_hypotheses_in_order(model):
    actual = model.generate(TEXTS, num_return=3, beam_size=4, return_details=True)
    assert model.translate(TEXTS, beam_size=4) == [entries[0].text for entries in actual]
    assert len(actual) == len(TEXTS)


def test_blank_lines_stay_blank(model):
    actual = model.generate(["", "1 2", "   ", "3"], num_return=2, beam_size=2, return_details=True)
    assert [[t.text for t in entries] for entries in (actual[0], actual[2])] == [[""], [""]]
    assert actual[0][0].finished
    alone = model.generate(["1 2"], num_return=2, beam_size=2, return_details=True)[0]
    assert [t.ids for t in actual[1]] == [t.ids for t in alone]
    assert model.translate([]) == []
    assert model.translate(["", ""]) == ["", ""]


def test_scores_equal_teacher_forcing(model):
    """With the mean over the length, EOS counted; suppressed tokens change no other scores."""
    num_finished = 0
    for beam in (1, 4):
        for entry in model.generate(
            ["3 1 0 2"], num_return=beam, beam_size=beam, return_details=True
        )[0]:
            if not entry.finished:
                continue
            log_probs, _ = teacher_forced(model, "3 1 0 2", entry.ids)
            assert entry.score == pytest.approx(float(log_probs.mean()), abs=1e-4)
            num_finished += 1
    assert num_finished > 1


def test_prefixes_begin_their_translations(model):
    prefixes = ["4 4", "", "0"]
    for beam in (1, 3):
        actual = model.generate(
            ["1 2 3", "1 2 3", "5"], prefixes=prefixes, beam_size=beam, return_details=True
        )
        for prefix, (entry, *_) in zip(prefixes, actual, strict=True):
            assert entry.text.startswith(prefix)
        assert (
            actual[1][0].ids
            == model.generate(["1 2 3"], beam_size=beam, return_details=True)[0][0].ids
        )


def test_a_prefix_with_unknown_parts_is_refused(model):
    """Its unknown part would be missing in the output."""
    with pytest.raises(UserError, match=r"no output can contain the prefix '4 ☃'.* it is '4"):
        model.generate(["1 2 3"], prefixes=["4 ☃"])


def test_samples_of_a_source_end_independently(model):
    """Also if one ends before the others: each equals a single sample."""
    options = {"temperature": 2.0, "seed": [3, 4], "max_new_tokens": 9}
    actual = model.generate(["1 2 3", "5 4"], num_return=3, **options, return_details=True)
    lengths = [[len(sample.ids) for sample in samples] for samples in actual]
    assert any(len(set(of_source)) > 1 for of_source in lengths)
    first = model.generate(["1 2 3", "5 4"], **options, return_details=True)
    assert [samples[0].ids for samples in actual] == [samples[0].ids for samples in first]


def test_texts_that_are_too_long_are_refused_or_truncated(model):
    long = " ".join("0123450123450")
    with pytest.raises(UserError, match="line 2 has 14 tokens, but the model allows 12"):
        model.translate(["1", long])
    with pytest.raises(UserError, match="line 11 has 14 tokens"):
        model.translate([long], first_number=11)
    before = model.num_truncated
    cut = model.translate([long, "1", long], too_long="truncate")
    assert model.num_truncated == before + 2
    by_hand = " ".join(long.split()[:11])  # with EOS 12
    assert cut == model.translate([by_hand, "1", by_hand])


def test_wrong_calls_are_refused(model):
    with pytest.raises(UserError, match="1 prefixes for 2 texts"):
        model.generate(["1", "2"], prefixes=["1"], return_details=True)
    with pytest.raises(UserError, match="2 sources but 1 targets"):
        model.score(["1", "2"], ["1"])
    with pytest.raises(UserError, match="no pairs"):
        model.teacher_forced([], [])
    assert model.score([], []) == []


def test_an_impossible_name_is_refused():
    with pytest.raises(UserError, match="too long"):
        heedful.load("x" * 5_000)


@pytest.mark.parametrize(
    ("sources", "options", "part"),
    [
        ([[-1, 2]], {}, "token id -1 is outside"),
        ([[10**23]], {}, "outside the model's vocabulary"),
        (["a \ud800"], {}, "lone surrogate"),
        (["1"], {"max_new_tokens": 10**20}, "at most 1,000,000"),
        (["1"], {"batch_tokens": 0}, "batch_tokens must be at least 1"),
        (["1"], {"banned": ["\ud800"]}, "lone surrogate"),
        (["1"], {"beam_size": 2, "require": [[10**9]]}, "token id 1000000000 is outside"),
    ],
)
def test_values_out_of_range_are_refused(model, sources, options, part):
    with pytest.raises(UserError, match=part):
        model.generate(sources, **options, return_details=True)


def test_progress_counts_every_text(model):
    calls = []
    model.generate(TEXTS, batch_tokens=8, progress=calls.append, return_details=True)
    assert sum(calls) == len(TEXTS)
    assert len(calls) > 1


class LowRank(torch.nn.Module):
    """A linear layer with a low-rank term (Hu et al. 2021)."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Parameter(torch.randn(2, linear.in_features))
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def test_a_net_with_wrapped_modules_is_not_saved(tmp_path):
    saved_model = model_of("gpt2")
    attention = saved_model.net.decoder.blocks[0].self_attention.sublayer
    attention.out = LowRank(attention.out)
    with pytest.raises(UserError, match=r"has .*out\.(down|linear).* and not .*out\.weight"):
        saved_model.save(tmp_path / "wrapped")
    attention.out = torch.nn.Linear(3, 5)
    with pytest.raises(UserError, match=r"has .*attention.*out\.weight and not the shapes"):
        saved_model.save(tmp_path / "wrapped")
    attention.out = torch.nn.Identity()
    with pytest.raises(UserError, match=r"lacks .*attention.*out\.weight"):
        saved_model.save(tmp_path / "wrapped")
    assert not [*tmp_path.iterdir()]


# --- scoring --------------------------------------------------------------------------------


def teacher_forced(model, source, ids):
    """Log-probabilities of a target's tokens from the net's logits for this pair alone, and the
    number of most probable ones."""
    src = torch.tensor([[*model.src_tokenizer.encode(source), model.src_tokenizer.eos_id]])
    with torch.no_grad():
        tgt = torch.tensor([[model.tgt_tokenizer.bos_id, *ids[:-1]]])
        logits = model.net(src, tgt)[0].double()
    right = int((logits.argmax(-1) == torch.tensor(ids)).sum())
    return logits.log_softmax(-1)[range(len(ids)), ids], right


def teacher_forced_pairs(model):
    """`teacher_forced` of each pair."""
    eos = model.tgt_tokenizer.eos_id
    return [
        teacher_forced(model, src, [*model.tgt_tokenizer.encode(tgt), eos]) for src, tgt in PAIRS
    ]


PAIRS = [("1 2 3", "1 2 3"), ("0", "5 5 5 5 5 5"), ("5 4 3 2 1", "2"), ("2 2", "2 2 1")]


def test_score_is_the_sum_over_the_nets_logits(model):
    actual = model.score(*zip(*PAIRS, strict=True))
    for (log_probs, _), score in zip(teacher_forced_pairs(model), actual, strict=True):
        assert score.log_prob == pytest.approx(float(log_probs.sum()), rel=1e-4)
        assert score.num_tokens == len(log_probs)


def test_perplexity_and_accuracy_are_over_all_tokens(model):
    actual = model.teacher_forced(*zip(*PAIRS, strict=True))
    parts, rights = zip(*teacher_forced_pairs(model), strict=True)
    count, right = sum(map(len, parts)), sum(rights)
    nll = -sum(float(log_probs.sum()) for log_probs in parts)
    assert actual["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert actual["token_accuracy"] == pytest.approx(right / count)
    assert 0 < right < count


INVISIBLE_LINES = ["\u200b", "\ufeff", " \u2060 ", "\u00ad", "\x07", " \u200d\t"]


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe"])
def test_a_line_of_invisible_characters_is_blank(kind: str) -> None:
    """Also with a tokenizer that has tokens for them."""
    import heedful
    from backend_models import TEXTS, model_of

    size = 60 if kind == "bpe" else 300
    text_with_them = [*TEXTS, *("a\u200bb", "a\u00adb")]
    tokenizer = heedful.train_tokenizer(text_with_them, kind=kind, vocab_size=size, or_fewer=True)
    translator, model = model_of("vaswani2017"), model_of("gpt2")
    for one in (translator, model):
        one._src_tokenizer = one._tgt_tokenizer = tokenizer
        one.check_ids = lambda *_: None
    assert translator.prompt_ids(["", "   ", *INVISIBLE_LINES]) == [[]] * 8
    assert translator.translate(INVISIBLE_LINES) == [""] * len(INVISIBLE_LINES)
    empty, *others = model.prompt_ids(["", "\u200b", "\ufeff\u00ad"])
    assert others == [empty, empty]
