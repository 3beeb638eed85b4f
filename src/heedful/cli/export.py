"""`heedful export`: a model in a format that other programs open."""

import typer

from heedful import pipelines
from heedful.cli.flags import (
    ModelFolder,
    NewFile,
    NewFolder,
    NormalizeOption,
    Overwrite,
    PoolingOption,
)
from heedful.cli.guard import add_command
from heedful.cli.help import new_group
from heedful.cli.shared import note

app = new_group("Convert a model to a format that other programs open.")


def hf(
    model: ModelFolder,
    out: NewFolder,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the weights: float32, bfloat16 or float16."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a model in the Hugging Face format, with its tokenizers.

    The directory opens with AutoTokenizer and the Auto class of the model's kind, without heedful.
    Its README.md is a model card: languages, use, recipe and scores of the run; what heedful cannot
    know, such as the license, is marked for you to fill in. An existing README.md is kept.

    Example: heedful export hf runs/novel novel-hf
    """
    from heedful.export import hf
    from heedful.export.model_card import CARD
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES | {CARD}, source=model)
    hf.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    hf.export_hf(opened, out, precision=precision, overwrite=overwrite, on_notice=note, run=model)
    typer.echo(f"{out}: a {opened.kind} in the Hugging Face format")


def ctranslate2(
    model: ModelFolder,
    out: NewFolder,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the weights: float32, bfloat16 or int8."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a model for CTranslate2 (heedful's extra `fast`), with its tokenizers.

    example.py in the directory shows its use without torch. A model that CTranslate2 does not
    support is refused with every reason.

    Example: heedful export ctranslate2 runs/translation translation-ct2
    """
    from heedful.export import ctranslate2
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    ctranslate2.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    ctranslate2.export_ctranslate2(opened, out, precision=precision, overwrite=overwrite)
    typer.echo(f"{out}: a {opened.kind} for CTranslate2; see {out / 'example.py'}")


def gguf(
    model: ModelFolder,
    out: NewFile,
    dtype: str = typer.Option(
        "f32",
        "--precision",
        metavar="NAME",
        help="Precision of the matrices: f32, bf16 or q8_0 (8 bits).",
    ),
    tokenizer: bool = typer.Option(
        True,
        "--tokenizer/--no-tokenizer",
        help="Write the tokenizer too, or the net alone, which reads ids.",
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a decoder-only model as a GGUF file for llama.cpp (heedful's extra `gguf`).

    Supported: GPT-2, GPT-3 without a window, LLaMA, Mistral, Mixtral, Qwen3 and Gemma 3, with a
    byte-level or SentencePiece tokenizer. What llama.cpp would compute otherwise is refused.

    Example: heedful export gguf runs/novel novel.gguf --precision q8_0
    """
    from heedful.export import gguf

    gguf.check_precision(dtype)
    gguf.check_file(out, overwrite=overwrite)
    opened = pipelines.load(model, device="cpu", backend="eager")
    gguf.export_gguf(
        opened, out, precision=dtype, tokenizer=tokenizer, overwrite=overwrite, on_notice=note
    )
    typer.echo(f"{out}: a {opened.kind} for llama.cpp")


def sentence_transformers(
    model: ModelFolder,
    out: NewFolder,
    pooling: PoolingOption = None,
    normalize: NormalizeOption = None,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the weights: float32, bfloat16 or float16."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export an encoder for sentence-transformers, with the pooling of its vectors.

    The directory opens with SentenceTransformer(OUT), and also as the Hugging Face format.

    Example: heedful export sentence-transformers runs/encoder for-st
    """
    from heedful.export import hf
    from heedful.export import sentence_transformers as st
    from heedful.files import MODEL_FILES, check_new

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=model)
    hf.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    st.export_sentence_transformers(
        opened,
        out,
        pooling=pooling,
        normalize=normalize,
        precision=precision,
        overwrite=overwrite,
        on_notice=note,
    )
    typer.echo(f"{out}: a {opened.kind} for sentence-transformers")


def onnx(
    model: ModelFolder,
    out: NewFolder,
    precision: str = typer.Option(
        "float32", metavar="NAME", help="Precision of the matrices: float32 or int8."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export a model as ONNX graphs (heedful's extra `onnx`), with its tokenizers.

    Encoders are one graph, language models one step with its cache, and encoder-decoders both.
    ONNX Runtime checks each graph against the net, for batches of several sizes, before it is
    written; examples/onnx_greedy.py runs them without heedful.

    Example: heedful export onnx runs/translation out-onnx --precision int8
    """
    from heedful.export import onnx
    from heedful.files import check_new

    check_new(out, overwrite=overwrite, owns=onnx.ONNX_FILES, source=model)
    onnx.check_precision(precision)
    opened = pipelines.load(model, device="cpu", backend="eager")
    onnx.export_onnx(opened, out, precision=precision, overwrite=overwrite, on_notice=note)
    typer.echo(f"{out}: a {opened.kind} for ONNX Runtime")


def peft(model: ModelFolder, out: NewFolder, overwrite: Overwrite = False) -> None:
    """Export the adapter (LoRA) of a model for peft, without its base model.

    peft opens it beside the base model in the Hugging Face format (heedful export hf BASE). A model
    with more tokens than its base needs a base that was resized (resize_token_embeddings).

    Example: heedful export peft runs/adapted adapter
    """
    from heedful.export.peft import export_peft

    export_peft(model, out, overwrite=overwrite, say=note)
    typer.echo(f"{out}: an adapter for peft")


add_command(app, "hf", hf)
add_command(app, "peft", peft)
add_command(app, "ctranslate2", ctranslate2)
add_command(app, "sentence-transformers", sentence_transformers)
add_command(app, "gguf", gguf)
add_command(app, "onnx", onnx)
