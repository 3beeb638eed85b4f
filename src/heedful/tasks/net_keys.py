"""Keys of a net's Config that a task and its data determine."""

from heedful.config import Recipe
from heedful.errors import UserError
from heedful.tasks.run_data import RunData
from heedful.zoo import architecture

TWO_STACKS = {"architecture": "vaswani2017", "size": "tiny"}  # default of `model`
NO_DATA = 8  # vocabulary size before the data are read


def check_derived_keys(recipe: Recipe) -> None:
    """Raise UserError for encoder keys that the task determines."""
    for key in ("head", "num_labels"):
        if key in recipe.model:
            raise UserError(f"model.{key} is determined by the task {recipe.task}; leave it out")


def encoder_keys(recipe: Recipe, data: RunData | None, name: str, head: str) -> dict[str, object]:
    """Config keys of an encoder with a head; raises UserError for another architecture."""
    if not architecture(name).has_key("head"):
        raise UserError(
            f"{name} is not an encoder, which the task {recipe.task} requires; set "
            "model.architecture to bert, roberta or distilbert, or start from such a model"
        )
    vocab_size = NO_DATA if data is None else data.tokenizer.vocab_size
    return {"vocab_size": vocab_size, "head": head, "max_length": recipe.data.max_length}


def decoder_keys(
    recipe: Recipe, data: RunData | None, name: str, max_length: int
) -> dict[str, object]:
    """Config keys of a decoder-only net; raises UserError for another architecture."""
    if any(architecture(name).has_key(key) for key in ("head", "num_decoder_layers")):
        raise UserError(
            f"{name} is not decoder-only, which the task {recipe.task} requires; set "
            "model.architecture to gpt2, llama or another language model, or start from one"
        )
    return {
        "vocab_size": NO_DATA if data is None else data.tokenizer.vocab_size,
        "max_length": max_length,
    }


def two_stack_keys(recipe: Recipe, data: RunData | None, name: str) -> dict[str, object]:
    """Config keys of an encoder-decoder; raises UserError for another architecture."""
    if not architecture(name).has_key("num_decoder_layers"):
        raise UserError(
            f"{name} is not an encoder-decoder, which the task {recipe.task} requires; set "
            "model.architecture to vaswani2017, bart, marian or t5"
        )
    src, tgt = (NO_DATA,) * 2 if data is None else (t.vocab_size for t in data.tokenizers)
    keys: dict[str, object] = {"src_vocab_size": src, "tgt_vocab_size": tgt}
    if data is not None and data.tokenizers[0] is not data.tokenizers[1]:
        keys |= {"tie_embeddings": "decoder"} if name == "vaswani2017" else {}
    return keys | {"max_length": recipe.data.max_length}
