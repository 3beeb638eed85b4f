"""GGUF files: the tensors, and llama.cpp's logits and tokens, which equal those of the net."""

import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import heedful
from heedful import zoo
from heedful.data.hf_tokenizers import open_tokenizer
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.export.gguf import PRECISIONS, check_file, export_gguf
from heedful.export.gguf_tokenizer import _PRE_TOKENIZERS
from heedful.pipelines.metadata import GenerationIds
from llama_cpp_files import GgufModel, api
from option_space import randomized

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
needs_llama_cpp = pytest.mark.skipif(api is None, reason="llama-cpp-python is not installed")

SIZES: dict[str, Any] = {"vocab_size": 40, "d_model": 32, "num_heads": 4, "num_layers": 2}
SIZES |= {"d_ff": 48, "max_length": 64}
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 6}
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"d_ff": None}),
    "gpt2 without biases, untied": ("gpt2", {"bias": False, "tie_embeddings": False}),
    "gpt3": ("gpt3", {"window": None}),
    "llama": ("llama", {"num_kv_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama interleaved, ntk": (
        "llama",
        {"rope_layout": "interleaved", "rope_scaling": {"type": "ntk", "factor": 4.0}},
    ),
    "llama 3, tied": (
        "llama",
        {"tie_embeddings": True, "rope_scaling": {"type": "llama3", "original_length": 16}},
    ),
    "mistral": ("mistral", HEADS | {"window": 48}),
    "mixtral": ("mixtral", HEADS | {"num_experts": 3}),
    "mixtral of one expert": ("mixtral", HEADS | {"num_experts": 2, "top_k": 1}),
    "qwen3": ("qwen3", HEADS | {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "qwen3 yarn": (
        "qwen3",
        HEADS
        | {
            "head_dim": 16,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_length": 16}
            | {"attention_factor": 1.3, "fast": 8.0},
        },
    ),
    "gemma3": (
        "gemma3",
        HEADS | {"window": 5, "global_every": 2, "num_layers": 3, "query_scalar": 9}
        | {"rope_scaling": {"type": "linear", "factor": 8.0}, "logit_softcap": 4.0},
    ),
}  # fmt: skip
TEXT = "it's a heedful test: 3 words, then 1,024 more\n  and café naïve 中文 😀 don't\t" * 3
HOSTILE = [
    "",
    " ",
    "a",
    " leading and trailing ",
    "two  spaces,\n\n  newlines\r\n\ttabs",
    "'s 'S it'll DON'T we've",
    "1234567 3.14 ١٢٣ ½",
    "naïve café e\u0301 Ǆ ﬁ ß",
    "中文 and 日本語 한국어 ไทย हिन्दी",
    "😀👩‍👩‍👧 \u200d\u200b\ufeff",
    "</s> <s> <unk> <pad>",
    "\x00\x01 \x7f \u0085 \u2028",
    "\u2581 \u2581a ▁▁",
    "a" * 50 + "!?!?...",
    "\U0010ffff \ue000",
]


def model_of(name: str, keys: dict[str, Any], tokenizer: Tokenizer | None = None) -> Any:
    """A language model of random weights."""
    architecture = zoo.architecture(name)
    config = architecture.config(**SIZES | keys)
    torch.manual_seed(3)
    net = randomized(architecture.build(config), by=0.2)
    ids = GenerationIds(eos_ids=(2,), suppressed_ids=(0, 1))
    return heedful.from_net(net, config, tokenizer, generation=ids)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@needs_llama_cpp
@pytest.mark.parametrize("case", NETS)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    model = model_of(*NETS[case])
    path = tmp_path / "a.gguf"
    export_gguf(model, path)
    ids = torch.randint(SIZES["vocab_size"], (1, 40))
    expected = model.net(ids)[0].numpy()
    actual = GgufModel(path).logits(ids[0].tolist())
    # llama.cpp reads GELU from a table in float16.
    atol = 2e-2 if "gpt" in case or "gemma" in case else 2e-4
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol * np.abs(expected).max())
    assert np.abs(expected).max() > 1  # and not by chance
    clear = np.diff(np.sort(expected), axis=1)[:, -1] > 2 * atol * np.abs(expected).max()
    assert clear.sum() > 20
    assert (actual.argmax(1) == expected.argmax(1))[clear].all()


@needs_llama_cpp
def test_llama_cpp_continues_greedily_as_heedful(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], kind="byte_bpe", vocab_size=290, template="bos")
    model = model_of("llama", {"vocab_size": 300}, tokenizer)
    export_gguf(model, tmp_path / "a.gguf", precision="f32")
    other = GgufModel(tmp_path / "a.gguf")
    prompt = "it's a test"
    ids = other.encode(prompt, special=True)
    assert ids == model.prompt_ids([prompt])[0]
    assert ids[0] == tokenizer.bos_id
    assert other.eos_id == tokenizer.eos_id
    [output] = model.generate([prompt], max_new_tokens=12, return_details=True)[0]
    for token in output.ids:
        logits = other.logits(ids)[-1]
        logits[[*model.ids.suppressed_ids]] = -np.inf
        assert logits.argmax() == token
        ids.append(token)
    assert len(output.ids) > 3


@pytest.mark.parametrize("case", NETS)
def test_files_hold_the_tensors(case: str, tmp_path: Path) -> None:
    """As gguf-py reads them: exact in f32, within the precision in the others."""
    model = model_of(*NETS[case])
    read: dict[str, dict[str, np.ndarray]] = {}
    for precision in PRECISIONS:
        export_gguf(model, tmp_path / f"{precision}.gguf", precision=precision)
        tensors = gguf.GGUFReader(tmp_path / f"{precision}.gguf").tensors
        read[precision] = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in tensors}
        kinds = {t.tensor_type.name for t in tensors if t.data.ndim > 1}
        assert PRECISIONS[precision][0] in kinds
    count = sum(p.numel() for p in model.net.parameters())
    written = sum(t.size for name, t in read["f32"].items() if name != "rope_freqs.weight")
    zeros = sum(t.size for t in read["f32"].values() if not t.any())
    assert written - zeros == count
    embedding = model.net.embedding.tokens.weight.numpy()
    assert np.array_equal(read["f32"]["token_embd.weight"], embedding)
    for name, exact in read["f32"].items():
        assert read["bf16"][name].shape == exact.shape
        np.testing.assert_allclose(read["bf16"][name], exact, rtol=2**-8)
        if exact.shape[-1] % 32 == 0:  # half a step of 127, and the scale in float16
            blocks = exact.reshape(-1, 32)
            bound = np.abs(blocks).max(1, keepdims=True) * (0.5 / 127 + 2**-10)
            assert (np.abs(read["q8_0"][name].reshape(-1, 32) - blocks) <= bound).all()
        else:
            assert np.array_equal(read["q8_0"][name], exact)


def test_exports_do_not_change_the_net(tmp_path: Path) -> None:
    for case in ("llama interleaved, ntk", "gemma3"):
        model = model_of(*NETS[case])
        before = {name: weight.clone() for name, weight in model.net.named_parameters()}
        export_gguf(model, tmp_path / f"{case}.gguf")
        assert all(torch.equal(weight, before[n]) for n, weight in model.net.named_parameters())


def test_the_period_of_global_layers_is_a_number(tmp_path: Path) -> None:
    """Versions of llama.cpp ignore a list, and take every sixth layer as global."""
    export_gguf(model_of(*NETS["gemma3"]), tmp_path / "a.gguf")
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["gemma3.attention.sliding_window_pattern"]
    assert field.types == [gguf.GGUFValueType.UINT32]
    assert field.contents() == 2


# --- tokenizers ---------------------------------------------------------------------------------


def sentencepiece_tokenizer(folder: Path, **settings: Any) -> Tokenizer:
    """A tokenizer that was read from a SentencePiece model."""
    lines = [TEXT[:60], TEXT[50:], TEXT.upper(), "<0x41> a  b   c"]
    identity = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    path = folder / f"{len([*folder.iterdir()])}" / "tokenizer.model"
    path.parent.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1,
        hard_vocab_limit=False, **{"vocab_size": 420, **identity, **settings},
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return open_tokenizer(path)


def byte_level(pattern: str, *, ignore_merges: bool) -> Tokenizer:
    """A byte-level BPE with the words of a pattern, as those of LLaMA 3 and Qwen."""
    backend = Backend(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=["<s>", "</s>"], initial_alphabet=to_bytes.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([TEXT], trainer)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, "imported", {"bos": "<s>", "eos": "</s>"})


BYTES = {"model_type": "bpe", "byte_fallback": True, "allow_whitespace_only_pieces": True}
UNIGRAM = {"model_type": "unigram", "vocab_size": 90}
LLAMA_3, QWEN = [pattern for pattern, _ in _PRE_TOKENIZERS][1:]
TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "byte_bpe": lambda folder: train_tokenizer([TEXT], kind="byte_bpe", vocab_size=310),
    "byte": lambda folder: train_tokenizer([TEXT], kind="byte"),
    "llama 3": lambda folder: byte_level(LLAMA_3, ignore_merges=True),
    "qwen": lambda folder: byte_level(QWEN, ignore_merges=False),
    "sentencepiece bpe": lambda folder: sentencepiece_tokenizer(folder, **BYTES),
    "sentencepiece bpe with symbols": lambda folder: sentencepiece_tokenizer(
        folder, **BYTES, add_dummy_prefix=False, user_defined_symbols="<u>,ab"
    ),
    "unigram": lambda folder: sentencepiece_tokenizer(folder, **UNIGRAM),
    "unigram that trims": lambda folder: sentencepiece_tokenizer(
        folder, **UNIGRAM, remove_extra_whitespaces=True
    ),
    "unigram without a first space": lambda folder: sentencepiece_tokenizer(
        folder, **UNIGRAM, add_dummy_prefix=False
    ),
}


def random_texts(count: int) -> list[str]:
    """Texts of characters and pieces that tokenizers treat in special ways."""
    parts = [*"abtes it'sTE 013,.\n\t <>/ux-", "é", "中", "😀", "  ", "\u0301", "\u200d", "\xa0"]
    parts += ["\u3000", "'ll", "'S", "ab", "<u>", "\r\n"]
    chooser = random.Random(0)
    return ["".join(chooser.choices(parts, k=chooser.randint(1, 30))) for _ in range(count)]


@needs_llama_cpp
@pytest.mark.parametrize("case", TOKENIZERS)
def test_llama_cpp_encodes_texts_to_the_same_ids(case: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[case](tmp_path)
    notices: list[str] = []
    model = model_of("llama", {"vocab_size": tokenizer.vocab_size + 3}, tokenizer)
    export_gguf(model, tmp_path / "a.gguf", on_notice=notices.append)
    other = GgufModel(tmp_path / "a.gguf")
    texts = [*HOSTILE, *random_texts(200), TEXT]
    if not tokenizer.specials_are_text:  # imported: heedful reads names of special tokens
        names = ("<s>", "</s>", "<unk>")
        texts = [text for text in texts if not any(name in text for name in names)]
    if notices:
        assert len(notices) == 1
        assert "begins with one" in notices[0]
        texts = [text for text in texts if text[:1] not in (" ", "\u2581")]
    assert len(texts) > 150
    for text in texts:
        assert other.encode(text) == tokenizer.encode(text), repr(text)


@needs_llama_cpp
def test_texts_in_nfc_are_encoded_as_by_a_tokenizer_that_normalizes(tmp_path: Path) -> None:
    """As those of the recipe `language-model`, and of Qwen."""
    tokenizer = train_tokenizer([TEXT], kind="byte_bpe", vocab_size=310, normalization="nfc")
    notices: list[str] = []
    model = model_of("llama", {"vocab_size": 310}, tokenizer)
    export_gguf(model, tmp_path / "a.gguf", on_notice=notices.append)
    assert "to NFC" in notices[0]
    other = GgufModel(tmp_path / "a.gguf")
    for text in [*HOSTILE, *random_texts(100)]:
        assert other.encode(tokenizer.normalize(text)) == tokenizer.encode(text), repr(text)


REFUSED: dict[str, tuple[Callable[[Path], Tokenizer], str]] = {
    kind: (
        lambda folder, kind=kind: train_tokenizer([TEXT], kind=kind, vocab_size=90, or_fewer=True),
        reason,
    )
    for kind, reason in {
        "bpe": "without a piece for each byte",
        "unigram": "normalizes or splits texts otherwise",
        "char": "pieces are those of WordLevel",
        "wordpiece": "pieces are those of WordPiece",
    }.items()
} | {
    "template": (
        lambda folder: train_tokenizer(
            [TEXT], kind="byte_bpe", vocab_size=300, normalization="nfkc"
        ),
        "normalizes texts",
    ),
    "other words": (
        lambda folder: byte_level(QWEN, ignore_merges=True),
        "splits texts into words as none of",
    ),
    "a table of characters": (
        lambda folder: sentencepiece_tokenizer(
            folder, **UNIGRAM, normalization_rule_name="nmt_nfkc"
        ),
        "normalizes or splits",
    ),
    "symbols after a space": (
        lambda folder: sentencepiece_tokenizer(folder, **BYTES, user_defined_symbols="<u>"),
        "adds a space before a text, but none after '<u>'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_tokenizers_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    make, reason = REFUSED[case]
    tokenizer = make(tmp_path)
    model = model_of("llama", {"vocab_size": tokenizer.vocab_size}, tokenizer)
    path = tmp_path / "a.gguf"
    with pytest.raises(UserError, match=f"{reason}.*tokenizer=False"):
        export_gguf(model, path)
    assert not path.exists()
    export_gguf(model, path, tokenizer=False)
    assert "tokenizer.ggml.tokens" not in gguf.GGUFReader(path).fields


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("gpt", {}, "does not support gpt as"),
        ("gpt2", {"activation": "relu"}, "the activation relu"),
        ("gpt3", {"window": 4}, "no gpt3 with these settings"),
        ("llama", {"activation": "geglu"}, "the activation geglu"),
        ("qwen3", HEADS | {"attention_bias": True}, "attention_bias True"),
        ("qwen3", HEADS | {"rope_scaling": {"type": "llama3"}}, "rope_scaling of type llama3"),
        ("gemma3", HEADS | {"score_softcap": 3.0}, "score_softcap 3.0"),
        (
            "llama",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2,
                    "original_length": 9,
                    "truncate": False,
                }
            },
            "truncate False",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    name: str, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        export_gguf(model_of(name, keys), tmp_path / "a.gguf")
    assert not [*tmp_path.iterdir()]


def test_tokens_that_end_a_text_beyond_two_are_said(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], kind="byte_bpe", vocab_size=290, template="bos")
    model = model_of("llama", {"vocab_size": 300}, tokenizer)
    model.metadata = replace(model.metadata, generation=GenerationIds(eos_ids=(2, 40, 41)))
    notices: list[str] = []
    export_gguf(model, tmp_path / "a.gguf", on_notice=notices.append)
    assert notices == [f"the file names two tokens that end a text, and not {tokenizer.piece(41)}"]


def test_only_gguf_files_are_replaced_and_on_request(tmp_path: Path) -> None:
    model, path = model_of("gpt2", {}), tmp_path / "a.gguf"
    notices: list[str] = []
    export_gguf(model, path, on_notice=notices.append)
    assert notices == ["the model has no tokenizer: the file accepts ids only"]
    with pytest.raises(UserError, match="exists already"):
        export_gguf(model, path)
    export_gguf(model, path, overwrite=True)
    path.write_text("text")
    with pytest.raises(UserError, match="no GGUF file"):
        check_file(path, overwrite=True)
    with pytest.raises(UserError, match="precision of GGUF"):
        export_gguf(model, path, precision="q4")


def test_a_window_limits_the_context_of_the_file(tmp_path: Path) -> None:
    notices: list[str] = []
    model = model_of("mistral", HEADS | {"window": 7})
    export_gguf(model, tmp_path / "a.gguf", on_notice=notices.append)
    assert any("context length of the file is 7" in notice for notice in notices)
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["llama.context_length"].contents() == 7
