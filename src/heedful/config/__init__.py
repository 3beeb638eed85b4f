"""The recipe's keys by section, each with its type, default and description."""

from heedful.config.adapter import Adapter
from heedful.config.base import Strict
from heedful.config.data import (
    DEFAULT_TEXT_SHARE,
    DEFAULT_VALID_ROWS,
    Corpus,
    Data,
    Files,
    Filters,
    Generated,
    TokenizerRecipe,
)
from heedful.config.distillation import Distillation
from heedful.config.evaluation import OWN_METRICS, Evaluation, Expectation
from heedful.config.problems import wrong_key
from heedful.config.recipe import Recipe, default_values, drop_stale_bands, parse_recipe, task_keys
from heedful.config.training import Optimizer, Schedule, Training

__all__ = [
    "DEFAULT_TEXT_SHARE",
    "DEFAULT_VALID_ROWS",
    "OWN_METRICS",
    "Adapter",
    "Corpus",
    "Data",
    "Distillation",
    "Evaluation",
    "Expectation",
    "Files",
    "Filters",
    "Generated",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Strict",
    "TokenizerRecipe",
    "Training",
    "default_values",
    "drop_stale_bands",
    "parse_recipe",
    "task_keys",
    "wrong_key",
]
