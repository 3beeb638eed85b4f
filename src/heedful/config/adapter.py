"""The section `adapter`: low-rank updates (LoRA) that are trained in place of the weights."""

from pydantic import Field

from heedful.config.base import Strict


class Adapter(Strict):
    """A low-rank adapter of the model that the run starts from (Hu et al. 2022)."""

    rank: int | None = Field(
        None,
        ge=1,
        description="Rank of the update of each adapted matrix (LoRA); all other weights are "
        "frozen at those of init_from; null: all weights are trained.",
    )
    alpha: float = Field(
        16.0, gt=0, description="Scale of the updates, which are multiplied by alpha / rank."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout on the input of the updates, in training."
    )
    targets: list[str] = Field(
        ["q", "v"],
        description="Matrices with an update, by patterns of their names, as q, v, self_attention, "
        "feedforward, decoder, blocks.0 or * for all in blocks.",
    )
