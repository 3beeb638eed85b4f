"""Tiny models of transformers for many languages, with tokenizers as those that are published."""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers

from heedful.data.hf_tokenizers import read_tokenizer, write_tokenizer
from heedful.data.sentencepieces import read_sentencepiece
from hf_parity import random_hf

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused.",
    "Zwei junge Männer stehen im Freien, in der Nähe vieler Büsche.",
    "A café in the old town: naïve, coöperative, Ünder the bridge!",
    "今天天气很好，我们去公园吧！",
    "Walking, talking and working: they walked, talked and worked together.",
] * 6
SPM = "sentencepiece.bpe.model"
# By kind: the class of the tokenizer, the model type, and codes of English, German and Chinese.
KINDS: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "m2m100": ("M2M100Tokenizer", "m2m_100", ("en", "de", "zh")),
    "nllb": ("NllbTokenizer", "m2m_100", ("eng_Latn", "deu_Latn", "zho_Hans")),
    "mbart50": ("MBart50Tokenizer", "mbart", ("en_XX", "de_DE", "zh_CN")),
}
SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 64,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2,
}


def make_tokenizer(kind: str, directory: Path) -> None:
    """The files of a tokenizer as its authors published it."""
    directory.mkdir(parents=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        model_type="bpe" if kind == "nllb" else "unigram",
        vocab_size=180,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    (directory / SPM).write_bytes(model.getvalue())
    settings = {"tokenizer_class": KINDS[kind][0]}
    if kind == "m2m100":
        pieces = [piece.piece for piece in read_sentencepiece(directory / SPM).pieces[3:]]
        # The ids are in another order, and some pieces have none.
        names = ["<s>", "<pad>", "</s>", "<unk>", *sorted({*pieces} - {"▁and"}, reverse=True)]
        (directory / "vocab.json").write_text(json.dumps({n: i for i, n in enumerate(names)}))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": KINDS[kind][1]}))


def as_published(kind: str, directory: Path, out: Path) -> None:
    """The tokenizer of a directory as transformers saves it.

    Of NLLB it no longer reads SentencePiece models with their languages, only `tokenizer.json`.
    """
    if kind == "nllb":
        ours = read_tokenizer(directory)
        assert ours is not None
        write_tokenizer(ours, directory / "whole")
        settings = json.loads((directory / "whole/tokenizer_config.json").read_text())
        settings["tokenizer_class"] = KINDS[kind][0]
        (directory / "whole/tokenizer_config.json").write_text(json.dumps(settings))
        directory /= "whole"
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(out)


def make_model(kind: str, directory: Path) -> Any:
    """A random model of transformers and its tokenizer, saved in a directory."""
    make_tokenizer(kind, directory / "spm")
    as_published(kind, directory / "spm", directory / "hf")
    ours = read_tokenizer(directory / "spm")
    assert ours is not None
    config_class = transformers.AutoConfig.for_model(KINDS[kind][1]).__class__
    config = config_class(vocab_size=ours.vocab_size + 2, **SIZES)
    model = random_hf(transformers.AutoModelForSeq2SeqLM._model_mapping[config_class], config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)  # no ties
    model.save_pretrained(directory / "hf")
    path = directory / "hf/tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"src_lang": None}  # as in the published files
    path.write_text(json.dumps(settings))
    return model
