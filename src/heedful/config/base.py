"""The strict base class of a recipe's sections, and types that they share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Frozen; refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=0, lt=2**63)]
BeamSize = Annotated[int, Field(ge=1, le=1_000)]
Paths = str | list[str] | None
