"""Texts that no output contains, against decoded outputs and against every single token."""

import random
from typing import Any

import pytest
import torch

from backend_models import model_of
from heedful.errors import UserError
from heedful.generation.token_rules import BannedTexts
from tokenizer_kinds import KINDS, LINES, bert_like, byte_fallback, tokenizer_of

BANNED = ["un", "r H", "ü", " u", "bunt"]


@pytest.mark.parametrize(
    "make", [*KINDS, byte_fallback, bert_like], ids=lambda make: getattr(make, "__name__", make)
)
def test_a_token_is_forbidden_if_and_only_if_it_completes_a_banned_text(make: Any) -> None:
    """Of random ids that are allowed so far, for every token that may follow."""
    tokenizer = tokenizer_of(make) if isinstance(make, str) else make()
    rule = BannedTexts(BANNED, tokenizer.token_texts)
    rng, tokens = random.Random(0), range(tokenizer.vocab_size)
    likely = [token for line in LINES for token in tokenizer.encode(line)]
    num_forbidden = 0
    for _ in range(16):
        ids: list[int] = []
        for _ in range(8):
            forbidden = set(rule.completing(ids))
            texts = tokenizer.decode_batch([[*ids, token] for token in tokens])
            for token, text in zip(tokens, texts, strict=True):
                is_banned = any(banned in text for banned in BANNED)
                # Bytes of a wrong run are decoded as U+FFFD; the rule reads them as they are.
                assert (token in forbidden) == is_banned or (token in forbidden and "�" in text)
            num_forbidden += len(forbidden)
            source = likely if rng.random() < 0.8 else tokens
            ids.append(rng.choice([token for token in source if token not in forbidden]))
    assert num_forbidden


@pytest.mark.parametrize("name", ["gpt2", "vaswani2017"])
@pytest.mark.parametrize(
    "options",
    [{"beam_size": 1}, {"beam_size": 4, "num_return": 3}, {"temperature": 3.0, "num_return": 3}],
    ids=["greedy", "beam", "sampling"],
)
def test_no_search_writes_a_banned_text(name: str, options: dict[str, Any]) -> None:
    model, prompts = model_of(name), ["the cat", "dogs"]
    settings = {"max_new_tokens": 12, "seed": 1, **options}
    banned: list[str] = []
    for _ in range(4):  # ban what the outputs have, each time another part of them
        outputs = model.generate(prompts, banned=banned, **settings)
        texts = [text for own in outputs for text in ([own] if isinstance(own, str) else own)]
        assert not [text for text in texts for part in banned if part in text]
        if longest := max(texts, key=len):
            banned.append(longest[len(longest) // 2 :][:2])
    assert banned


def test_a_banned_text_is_not_written_across_the_end_of_a_prefix_or_in_a_stream() -> None:
    model = model_of("gpt2")
    options: dict[str, Any] = {"max_new_tokens": 8, "beam_size": 1}
    plain = model.generate("the cat", prefixes=["a d"], **options)
    banned = plain[2:4]
    text = model.generate("the cat", prefixes=["a d"], banned=[banned], **options)
    assert text.startswith("a d")
    assert banned in plain
    assert banned not in text
    assert banned not in "".join(model.stream("the cat", banned=[banned], **options))


def test_wrong_banned_texts_are_refused() -> None:
    with pytest.raises(UserError, match="a banned text is empty"):
        model_of("gpt2").generate("the cat", banned=[""])
    with pytest.raises(UserError, match="the prefix 'a dog' contains 'do', which is banned"):
        model_of("gpt2").generate("the cat", prefixes=["a dog"], banned=[[7], "do"])


def test_ids_beyond_the_vocabulary_of_the_net_are_ignored() -> None:
    tokenizer = tokenizer_of("char")
    rule = BannedTexts(["u"], tokenizer.token_texts)
    from heedful.generation.token_rules import Context

    size = tokenizer.encode("u")[0]  # the net lacks this token
    context = Context([[]], torch.tensor([[4, 10_000]]), torch.tensor([0]))
    assert rule(torch.zeros(1, size), context).isfinite().all()
