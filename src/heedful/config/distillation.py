"""The section `distillation`: training on the outputs of a larger model."""

from typing import Literal

from pydantic import Field

from heedful.config.base import BeamSize, Paths, Strict


class Distillation(Strict):
    """Learning from a teacher model; see `tasks/distillation.py` for the losses."""

    teacher: str | None = Field(
        None,
        description="Folder of the teacher model, set by `heedful distill`; null: no distillation.",
    )
    level: Literal["word", "sequence"] = Field(
        "word",
        description="Training signal: the teacher's token probabilities (word), or its decoded "
        "outputs as targets (sequence).",
    )
    temperature: float = Field(
        2.0,
        gt=0,
        description="Divisor of the logits of teacher and student in the distillation loss (level "
        "word).",
    )
    distillation_weight: float = Field(
        5.0,
        ge=0,
        description="Weight of the KL divergence from the teacher's probabilities (level word).",
    )
    cross_entropy_weight: float = Field(
        2.0, ge=0, description="Weight of the cross-entropy with the data's targets (level word)."
    )
    cosine_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the cosine distance between the last states of teacher and student "
        "(level word); 0: none.",
    )
    copy_layers: bool = Field(
        False,
        description="Initialize the student from every k-th layer of the teacher; `model` then "
        "holds what differs from the teacher.",
    )
    beam_size: BeamSize = Field(
        4, description="Beams of the search that produces the teacher's outputs (level sequence)."
    )
    include_references: bool = Field(
        False,
        description="Train on the data's own targets beside the teacher's outputs (level "
        "sequence).",
    )
    back_translation_models: Paths = Field(
        None,
        description="Folder, or list of folders, of models of the reverse direction, whose "
        "translations of the targets are added as sources (level sequence); null: none.",
    )
