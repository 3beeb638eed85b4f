"""What is learnt, one file a task: data first, then the model, its loss and its scores."""

from heedful import plugins

_SYNTHETIC = ("dates", "copy", "reverse", "sort")
plugins.task.declare(
    {
        "translation": "heedful.jobs.translation:Translation",
        "language_modelling": "heedful.jobs.language_modelling:LanguageModelling",
        "masked_lm": "heedful.jobs.masked_lm:MaskedLm",
        "denoising": "heedful.jobs.denoising:Denoising",
        "classification": "heedful.jobs.classification:Classification",
        **dict.fromkeys(_SYNTHETIC, "heedful.jobs.translation:Translation"),
    }
)
