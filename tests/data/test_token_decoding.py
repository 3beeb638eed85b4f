"""The bytes of single tokens, and texts that grow, against whole decoded texts."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heedful.data.decoding import GrowingText
from heedful.data.hf_tokenizers import open_tokenizer
from heedful.data.tokenizer import Tokenizer
from tokenizer_kinds import LINES, every_tokenizer

TOKENIZERS = every_tokenizer()
IDS = st.lists(st.integers(0, 2**16), min_size=1, max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(IDS)
def test_the_bytes_of_tokens_join_to_the_text(name: str, numbers: list[int]) -> None:
    """For any ids: also those that begin or end within a character, and those without a text."""
    tokenizer = TOKENIZERS[name]
    ids = [number % (tokenizer.vocab_size + 9) for number in numbers]
    whole, growing, parts = tokenizer.decode(ids), GrowingText(tokenizer.decoder), []
    text = ""
    for token in ids:
        [data] = growing.bytes_of([token])
        offset = growing.offset_of(data)
        parts.append((offset, data))
        text += growing.add([token])
        assert growing.length == len(text)
        assert whole.startswith(text)
    assert text + growing.end() == whole
    assert b"".join(data for _, data in parts).decode(errors=tokenizer.decoder.errors) == whole
    for offset, data in parts:
        own = data.decode(errors="ignore")
        if own and own.encode() == data:
            assert whole[offset : offset + len(own)] == own


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_growing_text_decodes_each_token_with_the_one_before_it_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = TOKENIZERS[name]
    decoder, num_decoded = tokenizer.decoder, 0
    library = decoder._library_texts

    def counted(rows: list[list[int]]) -> list[str]:
        nonlocal num_decoded
        num_decoded += sum(map(len, rows))
        return library(rows)

    monkeypatch.setattr(decoder, "_library_texts", counted)
    ids = [number % tokenizer.vocab_size for number in range(0, 7 * 300, 7)]
    growing = GrowingText(decoder)
    for token in ids:
        growing.add([token])
    assert num_decoded <= 3 * len(ids)
    num_decoded = 0
    GrowingText(decoder).add(ids)
    assert num_decoded <= 5 * len(ids)


def test_a_wrong_byte_does_not_replace_the_characters_before_it(tmp_path: Path) -> None:
    """As the program that defined byte pieces decodes them."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4), model_writer=model, minloglevel=2, num_threads=1,
        vocab_size=300, hard_vocab_limit=False, byte_fallback=True, model_type="bpe",
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours: Tokenizer = open_tokenizer(tmp_path / "tokenizer.model")
    theirs: Any = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in "今".encode() + b"\xe4\xbd" + b"a"]
    assert (
        ours.decode(ids)
        == theirs.decode(ids)
        == "今\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}a"
    )

    @settings(max_examples=60, deadline=None)
    @given(IDS)
    def check(numbers: list[int]) -> None:
        ids = [number % ours.vocab_size for number in numbers]
        ids = [token for token in ids if token not in ours.special_ids]
        # Of a text that begins with the byte of a space, which no text is encoded to, the library
        # leaves out this space.
        assume(not ids or theirs.id_to_piece(ids[0]) != "<0x20>")
        assert ours.decode(ids) == theirs.decode(ids)

    check()
