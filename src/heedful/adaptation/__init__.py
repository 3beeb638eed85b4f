"""Adaptation of a translator to a translation memory, by fine-tuning that keeps its quality on
other text."""

from heedful.adaptation.recipe import Adaptation
from heedful.adaptation.stages import Adapted, adapt

__all__ = ["Adaptation", "Adapted", "adapt"]
