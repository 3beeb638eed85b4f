"""Keys of a net's Config that follow from a task and its data."""

from heedful.config import Recipe
from heedful.errors import UserError
from heedful.tasks.run_data import Data
from heedful.zoo import architecture

TWO_STACKS = {"architecture": "vaswani2017", "size": "tiny"}  # where a recipe has no `model`
NO_DATA = 8  # entries of a vocabulary before the data are read


def check_derived_keys(recipe: Recipe) -> None:
    """Refuse keys of an encoder that its task decides."""
    for key in ("head", "num_labels"):
        if key in recipe.model:
            raise UserError(f"model.{key} follows from the task {recipe.task}; leave it out")


def encoder_keys(recipe: Recipe, data: Data | None, name: str, head: str) -> dict[str, object]:
    """Keys of a net of one stack that reads both ways; raises UserError for another net."""
    if not architecture(name).has_key("head"):
        raise UserError(
            f"{name} is no encoder, which the task {recipe.task} needs; set "
            "model.architecture to bert, roberta or distilbert, or start from such a model"
        )
    vocab_size = NO_DATA if data is None else data.tokenizer.vocab_size
    return {"vocab_size": vocab_size, "head": head, "max_length": recipe.data.max_length}


def two_stack_keys(recipe: Recipe, data: Data | None, name: str) -> dict[str, object]:
    """Keys of an encoder with a decoder; raises UserError for another net."""
    if not architecture(name).has_key("num_decoder_layers"):
        raise UserError(
            f"{name} has one stack, but the task {recipe.task} needs two; set "
            "model.architecture to vaswani2017, bart, marian or t5"
        )
    src, tgt = (NO_DATA,) * 2 if data is None else (each.vocab_size for each in data.tokenizers)
    keys: dict[str, object] = {"src_vocab_size": src, "tgt_vocab_size": tgt}
    if data is not None and data.tokenizers[0] is not data.tokenizers[1]:
        keys |= {"tie_embeddings": "decoder"} if name == "vaswani2017" else {}
    return keys | {"max_length": recipe.data.max_length}
