"""Tokenizers: round trips, special tokens in text, vocabulary sizes, determinism, files."""

import hashlib
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from heedful.data.special_tokens import SpecialTokens
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.data.tokenizer_training import SPECIALS
from heedful.errors import UserError

TEXT = [
    "Zwei junge Männer stehen im Freien, in der Nähe vieler Büsche.",
    "Ein kleines Mädchen (vier Jahre alt) klettert in ein Spielhaus aus Holz!",
    "Ist das „gut“ genug für 3.50 € – oder nicht?",
    "Two young men are outside; they're near many bushes, aren't they?",
    "A quick brown fox jumps over the lazy dog. [x] #1 @home ## a_b C:\\d 100%",
    "The quick brown fox is quick.",
    "他已經到了能瞭解它的年紀。",
    "今天天气很好，我们去公园吧！",
    "我们 今天 不去 GitHub 公园。",
    "Nice 👍🏽 family 👩‍👩‍👧 in 🇩🇪!",
    "3 1 4 1 5",
    "Der Hund läuft über die Wiese, und die Hunde laufen über die Straße.",
    "Männer, Frauen und Kinder laufen laut lachend durch die laute Straße.",
    "Walking, talking and working: they walked, talked and worked together.",
    "The foxes were hunting rabbits while the hunters were watching the foxes.",
    "公园很大，公园里的人很多，今天的天气很好。",
] * 2
SIZES = {"bpe": 300, "unigram": 140, "wordpiece": 300, "byte_bpe": 400}
KINDS = (*SIZES, "word", "char", "byte")
EXTRA = ("<mask>", "<extra_0>", "<sep>", "<extra_1>")
LOSSLESS = ("byte_bpe", "byte")
ALPHABET = "".join(sorted({c for line in TEXT for c in line}))

TRAINED = {kind: train_tokenizer(TEXT, kind=kind, vocab_size=SIZES.get(kind)) for kind in KINDS}


def single_spaced(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(ALPHABET, max_size=60))
@settings(max_examples=60, deadline=None)
def test_decoding_restores_normalized_text_of_known_characters(kind: str, text: str) -> None:
    tokenizer = TRAINED[kind]
    if kind == "word":  # only the words of its training text are known
        words = " ".join(TEXT).split()
        text = "  ".join(words[ord(c) % len(words)] for c in text)
    expected = text if kind in LOSSLESS else single_spaced(text)
    ids = tokenizer.encode(text)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == expected == tokenizer.normalize(text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=60))
@settings(max_examples=80, deadline=None)
def test_text_is_never_encoded_to_special_tokens_and_bytes_restore_any_string(
    kind: str, text: str
) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    allowed = set() if kind in LOSSLESS else {tokenizer.unk_id}
    assert set(ids) & tokenizer.special_ids <= allowed
    assert tokenizer.encode(tokenizer.normalize(text)) == ids
    assert kind not in LOSSLESS or tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_single_texts_and_loaded_tokenizers_equal_saved_ones(
    kind: str, tmp_path: Path
) -> None:
    tokenizer, path = TRAINED[kind], tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    loaded = Tokenizer.load(path)
    assert (loaded.kind, loaded.content()) == (kind, tokenizer.content())
    batch = [tokenizer.encode(line) for line in TEXT]
    for t in (tokenizer, loaded):
        assert t.encode_batch(TEXT) == batch
        assert t.decode_batch(batch) == [tokenizer.decode(ids) for ids in batch]


def test_pieces_of_kinds_word_and_byte_are_words_and_bytes() -> None:
    digits = train_tokenizer(["3 1 4", "1 5"], kind="word")
    assert digits.vocab_size == 8
    assert digits.decode(digits.encode("5 5 1")) == "5 5 1"
    assert digits.encode("5 9 31")[1:] == [digits.unk_id] * 2
    byte = TRAINED["byte"]
    assert byte.vocab_size == 260
    text = "aß今\x00\n"
    assert byte.encode(text) == [b + 4 for b in text.encode()]
    assert byte.tokens(byte.encode("a 今")) == ["a", "▁", "<E4>", "<BB>", "<8A>"]
    assert byte.decode([4 + 0xE4, 4 + ord("a")]) == "\ufffda"


def test_punctuation_is_separate_from_words() -> None:
    for kind in ("bpe", "unigram", "wordpiece"):
        tokenizer = train_tokenizer(
            ["Hund, Katze. (Maus)"] * 9 + TEXT, kind=kind, vocab_size=SIZES[kind]
        )
        for piece in tokenizer.tokens(list(range(4, tokenizer.vocab_size))):
            core = piece.removeprefix("##").removeprefix("▁")
            letters = [unicodedata.category(c)[0] in "LM" for c in core]
            assert all(letters) or not any(letters), piece


def test_unknown_characters_are_unknown_tokens_not_lost() -> None:
    for kind in ("bpe", "wordpiece", "char"):
        ids = TRAINED[kind].encode("The ☃ fox")
        assert ids.count(3) == 1, kind


def test_case_and_normal_forms() -> None:
    lower = train_tokenizer(TEXT, kind="char", lowercase=True)
    assert lower.decode(lower.encode("QUICK")) == "quick"
    assert lower.lowercases
    assert not TRAINED["char"].lowercases
    assert TRAINED["char"].encode("a\u0308") == TRAINED["char"].encode("ä")
    assert TRAINED["char"].normalize("①\u3000ﬁ\u2028x\ta▁b") == "1 fi x a b"
    nfc = train_tokenizer(TEXT, kind="char", normalization="nfc")
    assert nfc.normalize("①a\u0308") == "①ä"
    none = train_tokenizer(TEXT, kind="char", normalization="none")
    assert none.normalize(" ①a\u0308 ") == "①a\u0308"
    nfkc_bytes = train_tokenizer(TEXT, kind="byte", normalization="nfkc")
    assert nfkc_bytes.decode(nfkc_bytes.encode(" ①  x")) == " 1  x"


HUGE_SIZES = """
import resource, sys
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for kind in ("bpe", "unigram", "wordpiece", "byte_bpe", "word", "char"):
    for size in (2**24, 10**9):
        try:
            train_tokenizer(["a b"] * 9, kind=kind, vocab_size=size)
        except UserError as error:
            print(kind, size, error)
        else:
            assert kind in ("word", "char") and size == 2**24, kind  # sizes that they stay below
"""


def test_a_huge_vocabulary_is_refused_where_memory_is_limited() -> None:
    """The library's trainers abort the process if they cannot allocate memory."""
    ended = subprocess.run(
        [sys.executable, "-c", HUGE_SIZES], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sum("at most 16,777,216, not 1,000,000,000" in line for line in lines) == 6
    assert sum("is more than the text allows" in line for line in lines) == 4
    assert len(lines) == 10


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("extra", [(), EXTRA])
def test_vocab_size_is_exact_or_refused(kind: str, extra: tuple[str, ...]) -> None:
    def trained(size: int) -> Tokenizer:
        tokenizer = train_tokenizer(TEXT, kind=kind, vocab_size=size, extra_specials=extra)
        assert tokenizer.vocab_size == size
        return tokenizer

    trained(SIZES[kind])
    with pytest.raises(
        UserError, match=r"vocabulary of 90000 is more .* allows: \d+; set"
    ) as large:
        trained(90_000)
    trained(int(str(large.value).split("allows: ")[-1].split(";")[0]))
    message = rf"of 30 is too small .* the {4 + len(extra)} special tokens need \d+; set"
    with pytest.raises(UserError, match=message) as small:
        trained(30)
    least = int(str(small.value).split("need ")[-1].split(";")[0])
    smallest = trained(least)
    assert not any(smallest.unk_id in smallest.encode(line) for line in TEXT)
    with pytest.raises(UserError, match=f"need {least}"):
        trained(least - 1)


@pytest.mark.parametrize("kind", ["word", "char"])
def test_a_limited_vocabulary_has_the_most_frequent_entries(kind: str) -> None:
    tokenizer = train_tokenizer(["b a a", "c b a"], kind=kind, vocab_size=6)
    assert tokenizer.vocab_size == 6
    assert tokenizer.encode("a").count(tokenizer.unk_id) == 0
    assert tokenizer.encode("c").count(tokenizer.unk_id) == 1
    assert train_tokenizer(["b a"], kind=kind, vocab_size=900).vocab_size < 10


FINGERPRINT = """
import sys, hashlib, pathlib
sys.path[:0] = [sys.argv[1]]
from test_tokenizer import SIZES, TRAINED
print({k: hashlib.sha256(t._backend.to_str().encode()).hexdigest() for k, t in TRAINED.items()})
"""


def test_training_is_deterministic_across_processes_and_threads() -> None:
    actual = {
        k: hashlib.sha256(t._backend.to_str().encode()).hexdigest() for k, t in TRAINED.items()
    }
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", FINGERPRINT, str(Path(__file__).parent)]
        printed = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout
        assert printed.strip() == str(actual)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(UserError, match="cannot read"):
        Tokenizer.load(path)
    with pytest.raises(UserError, match="cannot read"):
        Tokenizer.load(tmp_path)
    TRAINED["bpe"].save(path)
    whole = path.read_bytes()
    bare = json.loads(whole)["tokenizer"]
    damaged = {**json.loads(whole), "tokenizer": {"version": "1.0"}}
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"\x80\x04",
        b"[]",
        json.dumps(bare).encode(),
        json.dumps(damaged).encode(),
        whole.replace(b"tokenizer-3", b"tokenizer-2"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"t\.json"):
            Tokenizer.load(path)


CODE = ["def f(x):\n", "    return x  # two  spaces\n", "\n\n", "if a:\n\tb = 1\r\n", " x"] * 4
KEEPING = tuple(kind for kind in KINDS if kind != "word")
KEPT = {
    kind: train_tokenizer(
        [*TEXT, *CODE, "a\u0308▁"],
        kind=kind,
        vocab_size=SIZES[kind] + 20 if kind in SIZES else None,
        keep_whitespace=True,
        normalization="none",
    )
    for kind in KEEPING
}
SPACES = " \n\t\r"


@pytest.mark.parametrize("kind", KEEPING)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_kept_whitespace_is_restored(kind: str, data: st.DataObject) -> None:
    tokenizer = KEPT[kind]
    marks = "\u0308▁" * (kind == "char")
    text = data.draw(st.text(ALPHABET + marks + SPACES * 20, max_size=60))
    ids = tokenizer.encode(text)
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == tokenizer.normalize(text) == text
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    assert kind != "char" or len(ids) == len(text)


def test_u2581_is_a_space_if_whitespace_is_kept() -> None:
    tokenizer = KEPT["bpe"]
    assert tokenizer.decode(tokenizer.encode(" x▁ x")) == tokenizer.normalize(" x▁ x") == " x  x"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained_on_them", [False, True])
def test_special_tokens_have_the_first_ids_and_their_names_in_text_are_text(
    kind: str, trained_on_them: bool, tmp_path: Path
) -> None:
    names = [*SPECIALS, *EXTRA]
    tricks = [*names, "a</s>b", "x <s> y", "x<mask>y <sep>", " ".join(names), "".join(names)]
    lines = TEXT + (tricks * 20 if trained_on_them else ["< > / _ p a d s u n k b x y 0 1"])
    size = SIZES[kind] + 30 if kind in SIZES else None
    tokenizer = train_tokenizer(lines, kind=kind, vocab_size=size, extra_specials=EXTRA)
    tokenizer.save(tmp_path / "t.json")
    for t in (tokenizer, Tokenizer.load(tmp_path / "t.json")):
        assert [t.pad_id, t.bos_id, t.eos_id, t.unk_id] == [0, 1, 2, 3]
        assert t.special_ids == frozenset(range(8))
        assert t.specials == SpecialTokens(0, 1, 2, 3, mask_id=4, sentinel_ids=(5, 7))
        assert t.tokens(range(8)) == names
        for text in tricks:
            ids = t.encode(text)
            assert set(ids) & t.special_ids <= {t.unk_id}, (text, t.tokens(ids))
            assert t.encode_batch([text, text]) == [ids, ids]
            if kind != "word" or trained_on_them:
                assert t.unk_id not in ids
                assert t.decode(ids) == text
        ids = t.encode("The quick fox")
        assert t.decode([1, *ids, 4, 5, 2, 0, 0]) == "The quick fox"
        decoded = t.decode([1, *ids[:1], 4, 7, 2], keep_specials=True)
        assert decoded.startswith("<s>")
        assert decoded.endswith("<mask><extra_1></s>")
        assert t.decode_batch([[4], ids], keep_specials=True)[0] == "<mask>"


@pytest.mark.parametrize("kind", KINDS)
def test_extra_special_tokens_do_not_change_the_pieces(kind: str) -> None:
    size = SIZES[kind] + len(EXTRA) if kind in SIZES else None
    own = TRAINED[kind]
    extra = train_tokenizer(TEXT, kind=kind, vocab_size=size, extra_specials=EXTRA)
    assert own.encode("") == []
    assert extra.vocab_size == own.vocab_size + len(EXTRA)
    for text in ("", *TEXT):
        assert extra.tokens(extra.encode(text)) == own.tokens(own.encode(text))


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        ("none", [7], [7, 8]),
        ("bos", [1, 7], [1, 7, 1, 8]),
        ("eos", [7, 2], [7, 2, 8, 2]),
        ("both", [1, 7, 2], [1, 7, 2, 8, 2]),
    ],
)
def test_templates(template: Any, one: list[int], two: list[int], tmp_path: Path) -> None:
    train_tokenizer(["a b"], kind="char", template=template).save(tmp_path / "t.json")
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.add_special_tokens([7]) == one
    assert tokenizer.add_special_tokens([7], [8]) == two
    assert tokenizer.encode_target([7]) == (one if one[-1] == 2 else [*one, 2])
    assert tokenizer.specials.cls_id == (1 if template == "both" else None)
    assert set(tokenizer.encode("a b")) & {1, 2} == set()


def test_a_template_without_pairs_refuses_them() -> None:
    backend = Backend.from_str(TRAINED["char"]._backend.to_str())
    backend.post_processor = processors.TemplateProcessing("<s> $A", "$A $B", [("<s>", 1)])
    tokenizer = Tokenizer(backend, "imported", {})
    assert tokenizer.add_special_tokens([5]) == [1, 5]
    with pytest.raises(UserError, match="does not support pairs"):
        tokenizer.add_special_tokens([5], [6])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("bpe", "laufen  laut, a_b", "▁laufen ▁laut, ▁a_b"),
        ("unigram", "laufen  laut, a_b", "▁laufen ▁laut, ▁a_b"),
        ("word", "Hund, lachend", "<unk> ▁lachend"),
        ("char", "ab cd", "ab ▁cd"),
        ("byte_bpe", "laufen laut,\nab", "laufen ▁laut, \n ab"),
        ("byte", "ab ä\tcd", "ab ▁<C3><A4> \t cd"),
        ("wordpiece", "laufen, a", "▁laufen , ▁a"),
    ],
)
def test_which_tokens_begin_a_word(kind: str, text: str, expected: str) -> None:
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    words: list[str] = []
    for piece, starts in zip(tokenizer.tokens(ids), tokenizer.word_starts(ids), strict=True):
        piece = piece.removeprefix("##").replace(" ", "▁")
        words = [*words, piece] if starts else [*words[:-1], words[-1] + piece]
    assert " ".join(words) == expected
    assert tokenizer.word_starts([1, *ids, 2]) == [True, *tokenizer.word_starts(ids), True]
    assert tokenizer.word_starts([]) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"texts": ["", " "]}, "no text"),
        ({"kind": "bpe"}, "needs a vocab_size"),
        ({"kind": "byte", "vocab_size": 260}, "unset vocab_size"),
        ({"kind": "word", "vocab_size": 4}, "must be more than the 4 special tokens"),
        ({"kind": "word", "keep_whitespace": True}, "kind word splits text at whitespace"),
        ({"extra_specials": ["mask"]}, "'mask' needs a name in angle brackets"),
        ({"extra_specials": ["<>"]}, "'<>' needs a name"),
        ({"extra_specials": ["<a b>"]}, "'<a b>' needs a name"),
        ({"extra_specials": ["<-->"]}, "'<-->' needs a name"),
        ({"extra_specials": ["<s>"]}, "'<s>' is given twice"),
        ({"extra_specials": ["<a>", "<a>"]}, "'<a>' is given twice"),
        ({"extra_specials": ["<a>"], "vocab_size": 5}, "than the 5 special tokens"),
    ],
)
def test_contradictory_settings_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(**{"texts": TEXT, "kind": "char", **setting})


def test_no_leading_space_is_counted_if_none_is_added() -> None:
    lines = ["abcabcab\n", "bcaabcca\n"] * 4
    with pytest.raises(UserError, match=r"need 9; set"):  # 4 specials, a, b, c, newline, one more
        train_tokenizer(lines, kind="unigram", vocab_size=8, keep_whitespace=True)
    tokenizer = train_tokenizer(lines, kind="unigram", vocab_size=9, keep_whitespace=True)
    assert tokenizer.decode(tokenizer.encode("ab\n\nc")) == "ab\n\nc"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "char"])
@pytest.mark.parametrize("keep_whitespace", [False, True])
def test_invisible_characters_in_a_word_do_not_lose_it(kind: str, keep_whitespace: bool) -> None:
    """Those of the training text are kept; others would be unknown, in some kinds with the word."""
    if keep_whitespace and kind == "word":
        return
    zwnj, soft = "\N{ZERO WIDTH NON-JOINER}", "\N{SOFT HYPHEN}"
    lines = ["the dog runs home", f"a cat{zwnj}fish swims"]
    sizes = {"bpe": 60, "unigram": 45, "wordpiece": 80}
    tokenizer = train_tokenizer(
        lines, kind=kind, vocab_size=sizes.get(kind), or_fewer=True, keep_whitespace=keep_whitespace
    )
    expected = tokenizer.encode("the dog runs")
    for mark in (soft, "\u200b", "\ufeff", "\u2060", "\x07", "\ufe0f"):
        assert tokenizer.encode(f"{mark}the do{mark}g runs{mark}") == expected
        assert tokenizer.encode_batch([f"the {mark} do{mark}g runs"]) != [[]]
        assert tokenizer.encode(mark) == tokenizer.encode("")
    fish = f"a cat{zwnj}fish"
    assert tokenizer.decode(tokenizer.encode(fish)) == fish
    if not keep_whitespace:
        assert tokenizer.encode("the\x1fdog \u200b\x1f\u200b runs") == expected


def test_invisible_characters_are_those_of_unicode_and_controls() -> None:
    """By the tables of the `tokenizers` library, but for whitespace."""
    from tokenizers import Regex, normalizers

    from heedful.data.rows import is_blank

    removed = normalizers.Replace(Regex(r"[\p{Default_Ignorable_Code_Point}\p{Cc}\s]"), "")
    wrong = [
        code
        for code in [*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE1000)]
        if is_blank(chr(code)) != (removed.normalize_str(chr(code)) == "")
    ]
    assert wrong == []
    assert is_blank("")
    assert not is_blank("\u200bx")
