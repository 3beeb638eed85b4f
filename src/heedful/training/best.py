"""The best model of a run so far, stored apart from the model that is used."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from heedful.files import replace_whole
from heedful.zoo.saved import WEIGHTS, load_tensors, read_metadata, save_tensors


class BestModel:
    """The weights with the highest value of the evaluation metric, of one step or a mean.

    They are in `checkpoints/best.safetensors` of the run's folder, with their value and a text
    that says which weights they are. `model.safetensors` has the same content while the run is not
    finished, as a hard link where the file system has these.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints" / "best.safetensors"
        self._model = run / WEIGHTS

    @property
    def value(self) -> float:
        """The value of the stored weights, higher is better; the lowest number without any."""
        return float(read_metadata(self.path).get("value", -sys.float_info.max))

    def save(self, weights: Mapping[str, Tensor], *, value: float, step: int, source: str) -> None:
        """Store weights, unless the stored ones have a higher value.

        Args:
            step: the step of training at which they were made.
            source: which weights they are, for a report.
        """
        if value < self.value:
            return
        facts = {"step": step, "value": value, "source": source}
        # One entry: the library writes several in no fixed order.
        save_tensors(self.path, weights, metadata={"training": json.dumps(facts)})
        self.publish()

    def publish(self) -> None:
        """Make the stored weights the model that is used, with the step that they are of."""
        with replace_whole(self._model) as beside:
            try:
                os.link(self.path, beside)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, beside)

    def write_final(self) -> tuple[dict[str, Tensor], str]:
        """Write the final model: the weights alone, as of a model that is saved again.

        Returns:
            The weights, and the text that says which they are.

        Raises:
            UserError: the stored weights are missing or damaged.
        """
        weights = load_tensors(self.path)
        save_tensors(self._model, weights)
        return weights, str(read_metadata(self.path)["source"])
