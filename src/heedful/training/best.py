"""The best weights of a run so far, stored besides the model that users load."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from heedful.files import atomic_replace
from heedful.zoo.saved import WEIGHTS, load_tensors, read_metadata, save_tensors


class BestModel:
    """The weights with the highest value of the evaluation metric: of one step, or an average.

    They are in `checkpoints/best.safetensors` of the run's folder, with their value and a
    description. Until the run is finished `model.safetensors` has the same content, as a hard link
    where the file system supports these.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints" / "best.safetensors"
        self._model = run / WEIGHTS

    @property
    def value(self) -> float:
        """The value of the stored weights, higher is better; the lowest float without weights."""
        return float(read_metadata(self.path).get("value", -sys.float_info.max))

    def save(self, weights: Mapping[str, Tensor], *, value: float, step: int, source: str) -> None:
        """Store weights, unless the stored ones have a higher value.

        Args:
            step: the training step of the weights.
            source: a description of the weights, for the report.
        """
        if value < self.value:
            return
        facts = {"step": step, "value": value, "source": source}
        # One entry, because safetensors writes several in no fixed order.
        save_tensors(self.path, weights, metadata={"training": json.dumps(facts)})
        self.publish()

    def publish(self) -> None:
        """Make the stored weights `model.safetensors`, with their step in its metadata."""
        with atomic_replace(self._model) as temporary:
            try:
                os.link(self.path, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, temporary)

    def write_final(self) -> tuple[dict[str, Tensor], str]:
        """Write the final `model.safetensors`: the stored weights without metadata.

        Returns:
            The weights and their description.

        Raises:
            UserError: the stored weights are missing or damaged.
        """
        weights = load_tensors(self.path)
        save_tensors(self._model, weights)
        return weights, str(read_metadata(self.path)["source"])
