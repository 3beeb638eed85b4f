"""A saved model opened for use: it comes back as it was, and its answers depend on nothing else."""

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


def test_saving_what_was_loaded_writes_the_same_files(model, folder, tmp_path):
    model.save(tmp_path / "a")
    again = heedful.load(tmp_path / "a", device="cpu")
    again.save(tmp_path / "b")
    assert not again.net.training
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json"}
    for name, content in files.items():
        assert content == (folder / name).read_bytes()


def test_saving_is_whole_or_nothing_and_replaces_models_alone(model, tmp_path, monkeypatch):
    """By a path or its text: what stops halfway leaves the older model as it was."""
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


def test_a_joint_tokenizer_is_one_and_two_are_two(model, tmp_path):
    assert model.src_tokenizer is model.tgt_tokenizer
    recipe = tiny(tokenizer__joint=False, training__max_steps=1, task="sort")
    train(parse_recipe(recipe), tmp_path / "two")
    two = heedful.load(tmp_path / "two", device="cpu")
    assert two.src_tokenizer is not two.tgt_tokenizer
    assert {"tokenizer.src.json", "tokenizer.tgt.json"} <= {
        path.name for path in (tmp_path / "two").iterdir()
    }
    assert two.config.tie_embeddings == "decoder"


def test_tied_tensors_are_saved_once_and_come_back_tied(model, folder):
    saved = load_file(folder / "model.safetensors")
    assert model.config.tie_embeddings == "all"
    embedding = [name for name, t in saved.items() if t.shape[0] == model.src_tokenizer.vocab_size]
    assert len(embedding) == 1
    total = sum(tensor.numel() for tensor in saved.values())
    assert total == sum(parameter.numel() for parameter in model.net.parameters())
    net = model.net
    assert net.head.out.weight is net.src_embedding.tokens.weight
    assert net.head.out.weight is net.tgt_embedding.tokens.weight


def test_loading_draws_no_random_numbers(folder):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    heedful.load(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_card_is_what_was_trained(folder):
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
def test_a_batch_is_its_lines_alone_in_any_order(model, data, lines, beam, batch_tokens):
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


def test_translate_is_the_best_of_search_in_order(model):
    found = model.generate(TEXTS, num_return=3, beam_size=4, return_details=True)
    assert model.translate(TEXTS, beam_size=4) == [entries[0].text for entries in found]
    assert len(found) == len(TEXTS)


def test_blank_lines_stay_blank(model):
    found = model.generate(["", "1 2", "   ", "3"], num_return=2, beam_size=2, return_details=True)
    assert [[t.text for t in entries] for entries in (found[0], found[2])] == [[""], [""]]
    assert found[0][0].finished
    alone = model.generate(["1 2"], num_return=2, beam_size=2, return_details=True)[0]
    assert [t.ids for t in found[1]] == [t.ids for t in alone]
    assert model.translate([]) == []
    assert model.translate(["", ""]) == ["", ""]


def test_a_score_is_what_teacher_forcing_gives(model):
    """With the average over the length, EOS counted; what may not be written changes no other."""
    for beam in (1, 4):
        for entry in model.generate(
            ["3 1 0 2"], num_return=beam, beam_size=beam, return_details=True
        )[0]:
            if not entry.finished:
                continue
            log_probs, _ = forced(model, "3 1 0 2", entry.ids)
            assert entry.score == pytest.approx(float(log_probs.mean()), abs=1e-4)


def test_prefixes_begin_their_translations(model):
    prefixes = ["4 4", "", "0"]
    for beam in (1, 3):
        found = model.generate(
            ["1 2 3", "1 2 3", "5"], prefixes=prefixes, beam_size=beam, return_details=True
        )
        for prefix, (entry, *_) in zip(prefixes, found, strict=True):
            assert entry.text.startswith(prefix)
        assert (
            found[1][0].ids
            == model.generate(["1 2 3"], beam_size=beam, return_details=True)[0][0].ids
        )


def test_samples_of_a_source_end_when_they_end(model):
    """Also where one ends before its sibling: each is what it is alone."""
    options = {"temperature": 2.0, "seed": [3, 4], "max_new_tokens": 9}
    found = model.generate(["1 2 3", "5 4"], num_return=3, **options, return_details=True)
    lengths = [[len(sample.ids) for sample in samples] for samples in found]
    assert any(len(set(of_source)) > 1 for of_source in lengths)
    first = model.generate(["1 2 3", "5 4"], **options, return_details=True)
    assert [samples[0].ids for samples in found] == [samples[0].ids for samples in first]


def test_what_is_too_long_is_refused_or_cut(model):
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


def test_mistakes_in_calls(model):
    with pytest.raises(UserError, match="1 prefixes for 2 texts"):
        model.generate(["1", "2"], prefixes=["1"], return_details=True)
    with pytest.raises(UserError, match="2 sources but 1 targets"):
        model.score(["1", "2"], ["1"])
    with pytest.raises(UserError, match="no pairs"):
        model.score([], [])


def test_a_name_that_cannot_be_is_told():
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
def test_values_that_no_one_should_give(model, sources, options, part):
    with pytest.raises(UserError, match=part):
        model.generate(sources, **options, return_details=True)


def test_progress_counts_every_text(model):
    seen = []
    model.generate(TEXTS, batch_tokens=8, progress=seen.append, return_details=True)
    assert sum(seen) == len(TEXTS)
    assert len(seen) > 1


class LowRank(torch.nn.Module):
    """A linear with a low-rank term beside it (Hu et al. 2021)."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Parameter(torch.randn(2, linear.in_features))
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, 2))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def test_a_net_that_could_not_be_loaded_again_is_not_saved(tmp_path):
    made = model_of("gpt2")
    attention = made.net.decoder.blocks[0].self_attention.sublayer
    attention.out = LowRank(attention.out)
    with pytest.raises(UserError, match=r"has .*out\.(down|linear).* and not .*out\.weight"):
        made.save(tmp_path / "wrapped")
    attention.out = torch.nn.Linear(3, 5)
    with pytest.raises(UserError, match=r"has .*attention.*out\.weight and not the shapes"):
        made.save(tmp_path / "wrapped")
    attention.out = torch.nn.Identity()
    with pytest.raises(UserError, match=r"lacks .*attention.*out\.weight"):
        made.save(tmp_path / "wrapped")
    assert not [*tmp_path.iterdir()]


# --- scoring --------------------------------------------------------------------------------


def forced(model, source, ids):
    """Log-probabilities of a target's tokens, from the net's logits for this pair alone, and how
    many of them are likeliest."""
    src = torch.tensor([[*model.src_tokenizer.encode(source), model.src_tokenizer.eos_id]])
    with torch.no_grad():
        tgt = torch.tensor([[model.tgt_tokenizer.bos_id, *ids[:-1]]])
        logits = model.net(src, tgt)[0].double()
    right = int((logits.argmax(-1) == torch.tensor(ids)).sum())
    return logits.log_softmax(-1)[range(len(ids)), ids], right


def forced_pairs(model):
    """The same of each of the pairs."""
    eos = model.tgt_tokenizer.eos_id
    return [forced(model, src, [*model.tgt_tokenizer.encode(tgt), eos]) for src, tgt in PAIRS]


PAIRS = [("1 2 3", "1 2 3"), ("0", "5 5 5 5 5 5"), ("5 4 3 2 1", "2"), ("2 2", "2 2 1")]


def test_score_is_the_sum_over_the_nets_logits(model):
    found = model.score(*zip(*PAIRS, strict=True))
    for (log_probs, _), score in zip(forced_pairs(model), found, strict=True):
        assert score.log_prob == pytest.approx(float(log_probs.sum()), rel=1e-4)
        assert score.num_tokens == len(log_probs)


def test_perplexity_and_accuracy_are_over_all_tokens(model):
    found = model.teacher_forced(*zip(*PAIRS, strict=True))
    parts, rights = zip(*forced_pairs(model), strict=True)
    count, right = sum(map(len, parts)), sum(rights)
    nll = -sum(float(log_probs.sum()) for log_probs in parts)
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert found["token_accuracy"] == pytest.approx(right / count)
    assert 0 < right < count
