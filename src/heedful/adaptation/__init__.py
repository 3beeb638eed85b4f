"""Adaptation of a translator to a translation memory, by fine-tuning that keeps its quality on
other text."""

from heedful.adaptation.adapt import Adapted, adapt
from heedful.adaptation.recipe import Adaptation

__all__ = ["Adaptation", "Adapted", "adapt"]
