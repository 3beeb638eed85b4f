"""What a run trains on and is judged by, one file a task: data, model's sizes, loss, scores."""

from importlib import import_module
from typing import Any

_FILES = {
    "translation": ("translation", "Translation"),
    "dates": ("translation", "Translation"),
    "copy": ("translation", "Translation"),
    "reverse": ("translation", "Translation"),
    "sort": ("translation", "Translation"),
    "language_modelling": ("language_modelling", "LanguageModelling"),
    "masked_lm": ("masked_lm", "MaskedLm"),
    "denoising": ("denoising", "Denoising"),
    "classification": ("classification", "Classification"),
}


def job_of(task: str) -> Any:
    """The class of a task's job."""
    file, name = _FILES[task]
    return getattr(import_module(f"heedful.jobs.{file}"), name)
