"""Import and export of Hugging Face tokenizers, against `transformers` and `sentencepiece`.

The directories are made here, small, from a few lines; nothing is downloaded.
"""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from heedful.data.hf_tokenizers import open_tokenizer, read_tokenizer, write_tokenizer
from heedful.data.sentencepieces import read_sentencepiece
from heedful.data.special_tokens import SpecialTokens
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused.",
    "Zwei junge Männer stehen im Freien, in der Nähe vieler Büsche.",
    "A café in the old town: naïve, coöperative, Ünder the bridge!",
    "Two young men are outside; they're near many bushes, aren't they?",
    "今天天气很好，我们去公园吧！",
    "他已經到了能瞭解它的年紀。",
    "Numbers 3.14 and 2024, mails a_b@c.de, and code: if (x == 1) { return; }",
    "Walking, talking and working: they walked, talked and worked together.",
] * 6
TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "the QUICK  brown   fox ",
    "今天天气很好。Hello 他已經到了",
    "café, naïve — Ünder! e\u0301 ﬁ ①",
    "family 👩‍👩‍👧 👍🏽 and 🇩🇪",
    "two\nlines\n\nand\ttabs\r\n",
    "don't you'll (a,b) [x] #1 100% a_b",
    "a</s>b and <s> [CLS] x [SEP] <mask> [MASK] <pad> <unk> <|endoftext|> <extra_id_1> y",
    "zßλЖ☃ unknown",
    "<0x41> ## ▁ Ġ </w>",
]
PAIRS = [("The quick fox", "the lazy dog"), ("", "café"), ("今天", "  b")]


def write(directory: Path, name: str, content: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def wordpiece(directory: Path, **settings: Any) -> None:
    trained = tokenizers.BertWordPieceTokenizer(lowercase=settings.get("do_lower_case", True))
    trained.train_from_iterator(LINES, vocab_size=400, show_progress=False)
    directory.mkdir(parents=True)
    trained.save_model(str(directory))
    write(directory, "config.json", {"model_type": "bert"})
    write(directory, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", **settings})


def byte_bpe(directory: Path, model_type: str, specials: list[str], **settings: Any) -> None:
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES, 500, show_progress=False, special_tokens=specials)
    directory.mkdir(parents=True)
    trained.save_model(str(directory))
    write(directory, "config.json", {"model_type": model_type})
    if settings:
        write(directory, "tokenizer_config.json", settings)


def gpt1(directory: Path) -> None:
    trained = tokenizers.CharBPETokenizer(lowercase=True)
    trained.train_from_iterator(LINES, 400, show_progress=False)
    directory.mkdir(parents=True)
    trained.save_model(str(directory))
    write(directory, "config.json", {"model_type": "openai-gpt"})


def spm(path: Path, lines: list[str] = LINES, **settings: Any) -> None:
    settings = {
        "vocab_size": 240,
        "character_coverage": 0.98,
        "hard_vocab_limit": False,
        **settings,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1, **settings
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA = {
    "model_type": "bpe",
    "vocab_size": 480,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}


def t5(directory: Path) -> None:
    spm(directory / "spiece.model", **T5)
    write(directory, "config.json", {"model_type": "t5"})


def llama(directory: Path, **settings: Any) -> None:
    spm(directory / "tokenizer.model", **LLAMA)
    write(directory, "config.json", {"model_type": "llama"})
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **settings}
    write(directory, "tokenizer_config.json", settings)


def xlm_roberta(directory: Path) -> None:
    spm(directory / "sentencepiece.bpe.model")
    write(directory, "config.json", {"model_type": "xlm-roberta"})


MASK = {"content": "<mask>", "lstrip": True, "normalized": False}
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
MAKERS: dict[str, Callable[[Path], None]] = {
    "bert": wordpiece,
    "bert_cased": lambda d: wordpiece(d, do_lower_case=False),
    "bert_accents": lambda d: wordpiece(d, strip_accents=False, tokenize_chinese_chars=False),
    "gpt2": lambda d: byte_bpe(d, "gpt2", ["<|endoftext|>"]),
    "gpt2_bos": lambda d: byte_bpe(d, "gpt2", ["<|endoftext|>"], add_bos_token=True),
    "roberta": lambda d: byte_bpe(d, "roberta", FAIRSEQ),
    "roberta_split": lambda d: byte_bpe(d, "roberta", FAIRSEQ, split_special_tokens=True),
    "roberta_mask": lambda d: byte_bpe(
        d, "roberta", FAIRSEQ, mask_token={**MASK, "__type": "AddedToken"}
    ),
    "bart": lambda d: byte_bpe(d, "bart", FAIRSEQ, add_prefix_space=True),
    "gpt1": gpt1,
    "t5": t5,
    "llama": llama,
    "llama_legacy": lambda d: llama(d, legacy=True),
    "llama_eos": lambda d: llama(d, add_eos_token=True, pad_token="<unk>"),
    "xlm_roberta": xlm_roberta,
}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A directory by the name of the function that makes it, and its tokenizer in `transformers`;
    made once."""
    root, known = tmp_path_factory.mktemp("directories"), {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in known:
            MAKERS[name](root / name)
            known[name] = root / name, reference(root / name)
        return known[name]

    return make


def reference(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def read(directory: Path, **settings: Any) -> Tokenizer:
    actual = read_tokenizer(directory, **settings)
    assert actual is not None
    return actual


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str] = TEXTS) -> None:
    for text in texts:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids, (text, ours.tokens(ours.encode(text)))
        assert ours.add_special_tokens(ids) == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]
    for a, b in PAIRS:
        assert ours.add_special_tokens(ours.encode(a), ours.encode(b)) == theirs(a, b).input_ids
    for role in ("bos", "eos", "mask", "cls", "sep", "pad"):
        assert getattr(ours.specials, f"{role}_id") == getattr(theirs, f"{role}_token_id"), role


@pytest.mark.parametrize("name", MAKERS)
def test_tokenizers_from_all_kinds_of_files_are_equal(
    name: str, directory_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    directory, hf = directory_of(name)
    assert not (directory / "tokenizer.json").exists()
    ours = read(directory)
    assert (ours.kind, ours.vocab_size) == ("imported", len(hf))
    assert_same(ours, hf)

    hf.save_pretrained(tmp_path / "whole")
    shutil.copy(directory / "config.json", tmp_path / "whole")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "whole/tokenizer.json"))
    backend.enable_truncation(3)  # what a batch was once cut and filled to is ignored
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "whole/tokenizer.json"))
    whole = read(tmp_path / "whole")
    whole.save(tmp_path / "ours.json")
    loaded = Tokenizer.load(tmp_path / "ours.json")
    assert loaded.content() == whole.content()

    # With and without the model's config, which names another class of tokenizer.
    write_tokenizer(ours, tmp_path / "written")
    assert_same(ours, reference(tmp_path / "written"))
    shutil.copy(directory / "config.json", tmp_path / "written")
    written = reference(tmp_path / "written")
    assert_same(ours, written)
    assert written("a fox", "a dog") == hf("a fox", "a dog")  # types of tokens, too
    files = [tmp_path / "whole/tokenizer.json", *directory.glob("*.model")]
    for again in (whole, loaded, read(tmp_path / "written"), *map(open_tokenizer, files)):
        assert (again.specials, again.special_ids) == (ours.specials, ours.special_ids)
        assert_same(again, hf)


@pytest.mark.parametrize("is_generic", [False, True])
def test_the_settings_of_bert_win_over_the_normalizer_of_its_file(
    is_generic: bool, directory_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """As in transformers, unless the class there is one that takes the file as it is."""
    directory, hf = directory_of("bert_cased")
    hf.save_pretrained(tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    kind = "PreTrainedTokenizerFast" if is_generic else "BertTokenizer"
    settings |= {"do_lower_case": True, "strip_accents": False, "tokenizer_class": kind}
    write(tmp_path, "tokenizer_config.json", settings)
    ours = read(tmp_path)
    assert_same(ours, reference(tmp_path))
    assert (
        ours.encode("The Fox") == hf("The Fox", add_special_tokens=False).input_ids
    ) is is_generic


@pytest.mark.parametrize("has_space", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "GPT2Tokenizer"),
        ("gpt2", None),
        ("roberta", "RobertaTokenizer"),
        ("roberta", "PreTrainedTokenizerFast"),
        ("bart", "BartTokenizer"),
    ],
)
def test_the_first_space_is_that_of_the_settings(
    name: str,
    kind: str | None,
    has_space: bool,
    directory_of: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    """Of the classes for byte-level BPE in transformers; others take the file as it is."""
    directory, hf = directory_of(name)
    hf.save_pretrained(tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = not has_space
    write(tmp_path, "tokenizer.json", content)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"add_prefix_space": has_space, "tokenizer_class": kind}
    if kind is None:  # that of the model's type
        del settings["tokenizer_class"]
    write(tmp_path, "tokenizer_config.json", settings)
    assert_same(read(tmp_path), reference(tmp_path))
    if not has_space:
        del settings["add_prefix_space"]
        write(tmp_path, "tokenizer_config.json", settings)
        assert_same(read(tmp_path), reference(tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "gpt2_bos", "llama"])
def test_bos_and_eos_are_those_of_the_template_of_the_file(
    name: str, directory_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """As in transformers, whatever the settings say."""
    directory, hf = directory_of(name)
    hf.save_pretrained(tmp_path)
    shutil.copy(directory / "config.json", tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for changes in ({"add_bos_token": name == "gpt2"}, {"add_eos_token": True}):
        write(tmp_path, "tokenizer_config.json", settings | changes)
        assert_same(read(tmp_path), reference(tmp_path))


def test_missing_special_tokens(directory_of: Callable[[str], tuple[Path, Any]]) -> None:
    bert, gpt2, t5 = (read(directory_of(name)[0]) for name in ("bert", "gpt2", "t5"))
    assert bert.tokens([bert.unk_id]) == ["[UNK]"]
    assert t5.tokens([t5.unk_id, t5.pad_id]) == ["<unk>", "<pad>"]
    assert gpt2.specials == SpecialTokens(bos_id=gpt2.eos_id, eos_id=gpt2.eos_id)
    assert (gpt2.pad_id, gpt2.unk_id) == (0, -1)
    with pytest.raises(UserError, match=r"no end token \(eos\)"):
        _ = bert.eos_id


def test_sentinels_of_t5_count_down_from_the_last_id(
    directory_of: Callable[[str], tuple[Path, Any]],
) -> None:
    tokenizer = read(directory_of("t5")[0])
    last = tokenizer.vocab_size - 1
    assert tokenizer.specials.sentinel_ids == tuple(range(last, last - 100, -1))
    assert tokenizer.tokens([last, last - 99]) == ["<extra_id_0>", "<extra_id_99>"]
    ids = tokenizer.encode("The <extra_id_0> fox<extra_id_1>")
    assert [i for i in ids if i in tokenizer.special_ids] == [last, last - 1]
    assert tokenizer.decode(ids) == "The fox"
    assert "<extra_id_0>" in tokenizer.decode(ids, keep_specials=True)
    # The model has more rows than the tokenizer has ids.
    assert tokenizer.tokens([last + 9]) == [f"<id {last + 9}>"]
    assert tokenizer.decode([*ids, last + 9]) == "The fox"


FOXES = "Walking foxes, they"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("bert", FOXES, ["[CLS]", "walking", "foxes", ",", "they", "[SEP]"]),
        ("gpt2", FOXES, ["Walking", " foxes,", " they"]),
        ("roberta", FOXES, ["<s>", "Walking", " foxes,", " they", "</s>"]),
        ("gpt1", FOXES, ["walking</w>", "foxes</w>", ",</w>", "they</w>"]),
        ("t5", FOXES, [" Walking", " foxes,", " they", "</s>"]),
        ("llama", FOXES, ["<s>", " Walking", " foxes,", " they"]),
        # Words end at newlines, and bytes are parts of words.
        ("gpt2", "fox\nfox \u2603x", ["fox", "\n", "fox", " <E2><98><83>x"]),
        ("llama", "fox\nfox", ["<s>", " fox", "<0x0A>", "fox"]),
        ("llama", "fox ☃x", ["<s>", " fox", " <0xE2><0x98><0x83>x"]),
    ],
)
def test_which_tokens_begin_a_word(
    name: str, text: str, expected: list[str], directory_of: Callable[[str], tuple[Path, Any]]
) -> None:
    tokenizer = read(directory_of(name)[0])
    ids = tokenizer.add_special_tokens(tokenizer.encode(text))
    words: list[str] = []
    for piece, starts in zip(tokenizer.tokens(ids), tokenizer.word_starts(ids), strict=True):
        words = [*words, piece] if starts else [*words[:-1], words[-1] + piece.removeprefix("##")]
    assert [word.replace("▁", " ") for word in words] == expected


PLAIN_TEXTS = [text for text in TEXTS if "</s>" not in text and "<0x41>" not in text]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalization_rule_name": "nfkc_cf"},
        {"normalization_rule_name": "identity"},
        {"byte_fallback": True, "vocab_size": 500},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False},
        {"user_defined_symbols": "<sep>,quick,fox ju"},
        {"user_defined_symbols": "Numb,umbers,walk,alked,Walk"},
        {"model_type": "bpe", "vocab_size": 300},
        {"model_type": "bpe", "vocab_size": 300, "user_defined_symbols": "<sep>"},
        {**LLAMA, "add_dummy_prefix": False},
        {**LLAMA, "user_defined_symbols": "<sep>"},
        {"remove_extra_whitespaces": False},
    ],
    ids=str,
)
def test_sentencepiece_models_segment_text_as_sentencepiece(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.model"
    spm(path, **settings)
    hf = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = read(tmp_path)
    assert ours.vocab_size == hf.get_piece_size()
    assert ours.specials == SpecialTokens(bos_id=1, eos_id=2, unk_id=0)
    keeps_spaces = not settings.get("remove_extra_whitespaces", True)
    for text in [*PLAIN_TEXTS, "a<sep>b", "a <sep>  b ", "the quick fox jumps", *LINES[:8]]:
        if keeps_spaces and settings.get("add_dummy_prefix", True) and text[:1] == " ":
            continue  # transformers puts no space before one, SentencePiece does
        if keeps_spaces:
            text = text.replace("\r\n", "\n")  # one character to the library that normalises
        assert ours.encode(text) == hf.encode(text), (
            text,
            hf.encode(text, out_type=str),
        )
        ids = [i for i in hf.encode(text) if i != 0]
        assert ours.decode(ids) == hf.decode(ids)


def marian(directory: Path, *, separate: bool = False) -> None:
    english = [line for line in LINES if line.isascii()]
    other = [line for line in LINES if not line.isascii()]
    spm(directory / "source.spm", english)
    spm(directory / "target.spm", other)
    sides = [
        [piece.piece for piece in read_sentencepiece(directory / f"{side}.spm").pieces[3:]]
        for side in ("source", "target")
    ]
    # Some pieces are not in the vocabulary, which makes them unknown; ids are in no piece's order.
    sides = [[p for p in side if p not in ("▁quick", "ing")] for side in sides]

    def vocab(pieces: list[str]) -> dict[str, int]:
        names = ["</s>", "<unk>", "<pad>", ">>de<<", *sorted(set(pieces), reverse=True)]
        return {name: i for i, name in enumerate(names)}

    write(directory, "vocab.json", vocab(sides[0] if separate else sides[0] + sides[1]))
    if separate:
        write(directory, "target_vocab.json", vocab(sides[1]))
    write(directory, "config.json", {"model_type": "marian", "bos_token_id": 0})
    write(
        directory,
        "tokenizer_config.json",
        {"source_lang": "en", "target_lang": "de", "separate_vocabs": separate},
    )


@pytest.mark.parametrize("separate", [False, True])
def test_marian_segments_with_one_file_and_takes_ids_from_another(
    separate: bool, tmp_path: Path
) -> None:
    marian(tmp_path / "m", separate=separate)
    hf = reference(tmp_path / "m")
    assert type(hf).__name__ == "MarianTokenizer"
    src, tgt = read(tmp_path / "m", side="source"), read(tmp_path / "m", side="target")
    assert src.specials.bos_id is None
    assert read(tmp_path / "m").content() == src.content()
    assert src.vocab_size == len(json.loads((tmp_path / "m/vocab.json").read_text()))
    write_tokenizer(src, tmp_path / "written", tgt)
    written = reference(tmp_path / "written")
    src.save(tmp_path / "src.json")
    tgt.save(tmp_path / "tgt.json")
    sides = [
        (src, Tokenizer.load(tmp_path / "src.json"), read(tmp_path / "written", side="source")),
        (tgt, Tokenizer.load(tmp_path / "tgt.json"), read(tmp_path / "written", side="target")),
    ]
    texts = [*TEXTS, ">>de<< The quick fox", "Büsche und ü ß 今 今天", *LINES[:8]]
    for key, side in zip(("text", "text_target"), sides, strict=True):
        for text in texts:
            expected = hf(**{key: text}).input_ids
            assert written(**{key: text}).input_ids == expected
            for ours in side:
                assert ours.add_special_tokens(ours.encode(text)) == expected, text
                assert ours.encode_batch([text, text]) == [ours.encode(text)] * 2
        one = hf(**{key: LINES[0] + " ☃"}).input_ids
        decoded = hf.decode(one, skip_special_tokens=True, use_source_tokenizer=key == "text")
        if key == "text_target" or not separate:  # it decodes by the target's vocabulary alone
            assert side[0].decode(one).strip() == decoded
    assert src.encode("The quick fox").count(src.unk_id) == 1


@pytest.mark.parametrize(
    "name", ["/{there}", "../there", "..", "a/there", "..\\there", "C:there", "", "config.json"]
)
def test_a_tokenizers_files_are_never_paths(name: str, tmp_path: Path) -> None:
    """Otherwise an export of a hostile model could write files anywhere."""
    marian(tmp_path / "m")
    read(tmp_path / "m").save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    name = name.format(there=tmp_path / "there")
    content["files"][name] = content["files"].pop("source.spm")
    write(tmp_path, "tokenizer.json", content)
    with pytest.raises(UserError, match="which no tokenizer has"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "kind", ["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte"]
)
@pytest.mark.parametrize("template", ["none", "bos", "eos", "both"])
def test_tokenizers_trained_here_are_loaded_by_transformers(
    kind: str, template: Any, tmp_path: Path
) -> None:
    """Names of special tokens in a text are text in transformers too, except for a mask."""
    sizes = {"bpe": 280, "unigram": 134, "wordpiece": 310, "byte_bpe": 420}
    masks = template == "both"
    ours = train_tokenizer(
        LINES,
        kind=kind,
        vocab_size=sizes.get(kind),
        or_fewer=True,
        template=template,
        extra_specials=["<mask>", "<sep>", "<extra_0>"] if masks else ["<sep>"],
        keep_whitespace=kind in ("char", "bpe"),
    )
    write_tokenizer(ours, tmp_path)
    hf = reference(tmp_path)
    assert len(hf) == ours.vocab_size
    assert hf.mask_token_id == ours.specials.mask_id == (4 if masks else None)
    assert hf.pad_token_id == 0
    assert hf.unk_token_id == 3
    assert hf.cls_token_id == (1 if template == "both" else None)
    texts = [text for text in TEXTS if not masks or "<mask>" not in text]
    assert_same(ours, hf, [*texts, *LINES[:8]])
    assert "token_type_ids" not in hf("a fox")
    back = read(tmp_path)
    assert (back.specials, back.special_ids) == (ours.specials, ours.special_ids)
    assert back.add_special_tokens([7], [8]) == ours.add_special_tokens([7], [8])
    assert_same(back, hf, [*TEXTS, *LINES[:8]])
    write_tokenizer(back, tmp_path / "again")
    assert_same(ours, reference(tmp_path / "again"), texts)


def test_a_pair_of_tokenizers_is_written_to_separate_directories(tmp_path: Path) -> None:
    src = train_tokenizer(LINES, kind="char", template="eos")
    tgt = train_tokenizer(LINES[:2], kind="word", template="both")
    write_tokenizer(src, tmp_path / "two", tgt)
    for text in ("The quick fox", "dog"):
        for name, side, ours in (("source", "source", src), ("target", "target", tgt)):
            hf = reference(tmp_path / "two" / f"tokenizer_{name}")
            assert hf(text).input_ids == ours.add_special_tokens(ours.encode(text))
            assert read(tmp_path / "two", side=side).encode(text) == ours.encode(text)
        assert reference(tmp_path / "two")(text).input_ids == src.add_special_tokens(
            src.encode(text)
        )
    with pytest.raises(UserError, match="already holds two tokenizers"):
        write_tokenizer(src, tmp_path / "two")
    write_tokenizer(src, tmp_path / "one", train_tokenizer(LINES, kind="char", template="eos"))
    assert not (tmp_path / "one" / "tokenizer_source").exists()


def test_a_directory_without_special_token_names_uses_the_ids_of_its_config(tmp_path: Path) -> None:
    own = train_tokenizer(LINES, kind="unigram", vocab_size=130)
    write_tokenizer(own, tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    write(tmp_path, "config.json", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 9]})
    assert read(tmp_path).specials == own.specials


def test_added_tokens_keep_their_ids(
    directory_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    shutil.copytree(directory_of("gpt2")[0], tmp_path / "a")
    size = directory_of("gpt2")[1].vocab_size
    write(tmp_path / "a", "added_tokens.json", {"[PAD]": size, "<user>": size + 1})
    write(tmp_path / "a", "special_tokens_map.json", {"pad_token": "[PAD]"})
    ours, hf = read(tmp_path / "a"), reference(tmp_path / "a")
    assert (ours.specials.pad_id, ours.vocab_size) == (size, size + 2)
    assert_same(ours, hf, [*TEXTS, "a<user>b [PAD]"])
    assert size + 1 not in ours.special_ids
    write(tmp_path / "a", "tokenizer_config.json", {"split_special_tokens": True})
    assert_same(read(tmp_path / "a"), reference(tmp_path / "a"), [*TEXTS, "a<user>b [PAD]"])
    write(tmp_path / "a", "added_tokens.json", {"[PAD]": size + 5})
    with pytest.raises(UserError, match=r"the id \d+ for the token '\[PAD\]'"):
        read_tokenizer(tmp_path / "a")


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    write(tmp_path, "config.json", {"model_type": "bert"})
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, r"tokenizer\.json is damaged"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json is not JSON"),
        ({"tokenizer.json": "[1]"}, r"tokenizer\.json is damaged"),
        ({"vocab.txt": "a\nb\n"}, r"vocab\.txt is damaged .* has no \[UNK\]"),
        ({"vocab.txt": "[UNK]\n[CLS]"}, r"the vocabulary has no \[SEP\]"),
        ({"vocab.json": "[]", "merges.txt": ""}, r"vocab\.json is damaged"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c d"}, r"merges\.txt is damaged"),
        ({"spiece.model": "abc"}, r"spiece\.model is damaged"),
        ({"tokenizer.model": ""}, r"tokenizer\.model is damaged"),
        ({"vocab.txt": "[UNK]", "tokenizer_config.json": "[]"}, "must hold a JSON object"),
        ({"vocab.txt": "[UNK]", "tokenizer_config.json": '{"unk_token": {}}'}, "settings in"),
        ({"sentencepiece.bpe.model": ""}, r"\(not given\), which is not supported"),
        (
            {"vocab.txt": "[UNK]", "tokenizer_config.json": '{"tokenizer_class": "FooTokenizer"}'},
            "class FooTokenizer, which is not supported",
        ),
        (
            {"vocab.json": "{}", "merges.txt": "", "config.json": '{"model_type": "qwen2"}'},
            "class qwen2, which is not supported",
        ),
        (
            {"source.spm": "", "target.spm": "", "vocab.json": '{"a": 0}'},
            r"vocab\.json is damaged: it has no <unk>",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_damaged_and_unknown_files_are_refused(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(UserError, match=message):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_truncated_and_unsupported_sentencepiece_files_are_refused(
    keep: float, tmp_path: Path
) -> None:
    path = tmp_path / "spiece.model"
    spm(path, **T5)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match=r"spiece\.model is damaged"):
        read_tokenizer(tmp_path)
    spm(path, model_type="char")
    with pytest.raises(UserError, match="of type char"):
        read_tokenizer(tmp_path)


IMPORT = """
import sys
for name in sys.argv[3:]:
    sys.modules[name] = None
from pathlib import Path
from heedful.data.hf_tokenizers import open_tokenizer, write_tokenizer
tokenizer = open_tokenizer(Path(sys.argv[1]))
write_tokenizer(tokenizer, Path(sys.argv[2]))
print(tokenizer.encode("The fox"))
"""


@pytest.mark.parametrize("lacking", ["sentencepiece", "google.protobuf", "google.protobuf.message"])
def test_packages_of_the_extra_are_required_only_for_sentencepiece(
    lacking: str, directory_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    directory, hf = directory_of("t5")
    hf.save_pretrained(tmp_path / "whole")

    def imported(source: Path) -> subprocess.CompletedProcess[str]:
        arguments = [str(source), str(tmp_path / "written"), "transformers", lacking]
        command = [sys.executable, "-c", IMPORT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ids = str(hf("The fox", add_special_tokens=False).input_ids)
    assert imported(tmp_path / "whole").stdout.strip() == ids
    refused = imported(directory).stderr.splitlines()[-1]
    package = "sentencepiece" if lacking == "sentencepiece" else "protobuf"
    assert refused.endswith(f"which needs {package}: pip install 'heedful[import]'")


def test_open_tokenizer_accepts_files_and_directories(tmp_path: Path) -> None:
    own = train_tokenizer(LINES, kind="char")
    own.save(tmp_path / "own" / "tokenizer.json")  # as in a model directory of heedful
    for path in (tmp_path / "own", tmp_path / "own" / "tokenizer.json"):
        assert open_tokenizer(path).content() == own.content()
    spm(tmp_path / "alone" / "mine.model")
    alone = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "alone" / "mine.model"))
    actual = open_tokenizer(tmp_path / "alone" / "mine.model")
    assert actual.encode(LINES[0]) == alone.encode(LINES[0])
    with pytest.raises(UserError, match="holds no tokenizer files"):
        open_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*none\.json"):
        open_tokenizer(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"cannot read .*none\.model"):
        open_tokenizer(tmp_path / "none.model")
