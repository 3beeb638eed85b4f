"""Tasks, one file each: data, loss and evaluation."""

from heedful import plugins

plugins.task.declare(
    {
        "translation": "heedful.tasks.translation:Translation",
        "language_modeling": "heedful.tasks.language_modeling:LanguageModeling",
        "sft": "heedful.tasks.sft:SupervisedFineTuning",
        "masked_lm": "heedful.tasks.masked_lm:MaskedLm",
        "denoising": "heedful.tasks.denoising:Denoising",
        "classification": "heedful.tasks.classification:TextClassification",
        **dict.fromkeys(("copy", "reverse", "sort"), "heedful.tasks.synthetic:Synthetic"),
    }
)
