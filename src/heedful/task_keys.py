"""Keys of a recipe by task: those that it reads, and its defaults; imports no task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

# Keys of a run's end, on which some schedules of the learning rate depend.
ENDS = ("training.max_steps", "training.max_epochs")
# Keys that a resumed run may always change: its end, its display and its checkpoints. No optimizer
# step depends on them, except by a schedule on `ENDS`.
MAY_CHANGE = (
    "training.max_steps",
    "training.max_epochs",
    "training.max_minutes",
    "training.patience",
    "training.log_every",
    "training.checkpoint_every",
    "training.checkpoint_every_minutes",
    "training.tensorboard",
    "training.activation_checkpointing",
    "training.parallel",
    "evaluation.num_samples",
)
# Keys that the validation loss at a step does not depend on, except by a schedule on `ENDS`.
KEEP_BANDS = (*MAY_CHANGE, "expect", "data.folder", "training.device", "training.evaluate_every")
# Keys that serve the same purpose in different tasks.
_SAME_PURPOSE = (
    ("data.max_length", "objective.context"),
    ("data.valid_size", "data.generated.num_valid"),
    ("data.train.src", "data.train.tgt", "data.train.text", "data.train.file"),
    ("data.train.src_field", "data.train.tgt_field", "data.train.text_field"),
    ("data.train.messages_field", "data.train.text_field"),
    ("data.src_language", "data.tgt_language"),
)


@dataclass(frozen=True)
class TaskKeys:
    """The keys of a recipe that a task reads; setting any other key is an error.

    Attributes:
        names: dotted names. The name of a section includes all its keys, and a key of `data.train`
            the same key of `data.valid` and `data.test`.
        defaults: JSON values by dotted name where the task's default differs from that of
            `heedful.config`.
    """

    names: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def plus(self, *names: str, defaults: Mapping[str, Any] | None = None) -> "TaskKeys":
        """A copy with more keys and defaults."""
        return replace(
            self, names=self.names | {*names}, defaults={**self.defaults, **(defaults or {})}
        )

    def includes(self, name: str) -> bool:
        """True if the task reads the key."""
        parts = _of_train(name).split(".")
        return any(".".join(parts[:size]) in self.names for size in range(1, len(parts) + 1))

    def refusal(self, name: str, task: str) -> str:
        """The error message for a key that is set but not read, with the key to use instead."""
        group = next((group for group in _SAME_PURPOSE if _of_train(name) in group), ())
        section = name.rpartition(".")[0]
        known = [
            key.replace("data.train", section) if key.startswith("data.train.") else key
            for key in group
            if key in self.names
        ]
        advice = f"use {alternatives(known)}" if known else "leave it out"
        return f"{name} is not read by the task {task}; {advice}"

    def fill(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A recipe's content with the task's defaults for the keys that it does not set."""
        filled = dict(content)
        for name, value in self.defaults.items():
            section: Any = filled
            *parents, last = name.split(".")
            for parent in parents:
                inner = section.get(parent, {})
                if isinstance(inner, BaseModel):
                    inner = {key: getattr(inner, key) for key in inner.model_fields_set}
                if not isinstance(inner, Mapping):  # a wrong type, refused later
                    break
                section[parent] = dict(inner)
                section = section[parent]
            else:
                section.setdefault(last, value)
        return filled


def _of_train(name: str) -> str:
    for split in ("data.valid.", "data.test."):
        if name.startswith(split):
            return f"data.train.{name.removeprefix(split)}"
    return name


def key_of_corpus(name: str) -> str:
    """The recipe key that a task must support for the key `name` of a corpus in `data.corpora`.

    For files of training rows it is that of `data.train`, for tags `data.tgt_language`.
    """
    section = name.partition(".")[0]
    if section in ("valid", "test"):
        return f"data.{name}"
    if name in ("src_tag", "tgt_tag", "tgt_language"):
        return "data.tgt_language"
    return "data.corpora" if name in ("weight", "src_language") else f"data.train.{name}"


def alternatives(keys: Sequence[str], template: str = "{}", conjunction: str = " and ") -> str:
    """Source keys of a split as a choice, in words: src and tgt are one, because both are needed.

    Args:
        template: text of one key.
        conjunction: text between src and tgt.
    """
    texts = {key: template.format(key) for key in keys}
    pair = [texts.pop(key) for key in keys if key.rpartition(".")[2] in ("src", "tgt")]
    if not pair:
        return " or ".join(texts.values())
    return ", or ".join([conjunction.join(pair), *texts.values()])


ALL = TaskKeys(
    frozenset(
        (
            *("plugins", "task", "init_from", "model", "objective"),
            *("adapter", "training", "expect"),
            *("data.src_language", "data.max_length", "data.truncation", "data.workers"),
            *(f"tokenizer.{key}" for key in ("path", "kind", "vocab_size", "lowercase")),
            "tokenizer.sample_size",
            *("tokenizer.keep_whitespace", "tokenizer.normalization"),
            *("evaluation.metric", "evaluation.num_samples"),
        )
    )
)
_CORPORA = ("data.corpora", "data.temperature")
_HELD_OUT = ("data.valid_size", "data.drop_held_out")
_TEXT_FILTERS = tuple(
    f"data.filters.{key}"
    for key in (
        *("min_characters", "max_characters", "min_words", "max_words", "min_letters"),
        *("min_script", "src_script", "language", "language_probability", "unique"),
    )
)
_WORD_DISTILLATION = (
    *("distillation.teacher", "distillation.level", "distillation.temperature"),
    *(
        "distillation.distillation_weight",
        "distillation.cross_entropy_weight",
        "distillation.cosine_weight",
    ),
    "distillation.copy_layers",
)
_PAIRS = ALL.plus(
    *("data.tgt_language", "tokenizer.joint", "distillation", "evaluation.decode_sentences"),
    *("evaluation.beam_size", "evaluation.final_beam_size", "evaluation.length_penalty"),
)
PAIRS = _PAIRS.plus(
    *("data.folder", *_HELD_OUT, "data.train.src", "data.train.tgt", "data.train.file"),
    *("data.train.src_field", "data.train.tgt_field", "data.train.header", "data.filters"),
    *("data.keep", "data.keep_patterns"),
    *_CORPORA,
)
GENERATED_PAIRS = _PAIRS.plus(
    *("data.generated.num_train", "data.generated.num_valid", "data.generated.num_test"),
)
SYMBOLS = GENERATED_PAIRS.plus("data.generated")
TEXTS = ALL.plus(
    *("data.folder", "data.train.text", "data.train.text_field", "data.train.header"),
    *(*_HELD_OUT, "data.text_unit", *_TEXT_FILTERS, *_CORPORA),
)
LANGUAGE_MODELING = replace(TEXTS, names=TEXTS.names - {"data.max_length", "data.truncation"}).plus(
    *("objective.context", *_WORD_DISTILLATION),
    # Brown et al. 2020, appendix B.
    defaults={
        "training.label_smoothing": 0.0,
        "training.optimizer.betas": [0.9, 0.95],
        "training.optimizer.eps": 1e-8,
    },
)
MASKED_LM = TEXTS.plus(
    *("data.train.file", "data.train.label_field", "data.train.pair_field", *_WORD_DISTILLATION),
    # Devlin et al. 2019, appendix A.2, and their code.
    defaults={
        "training.label_smoothing": 0.0,
        "training.optimizer.betas": [0.9, 0.999],
        "training.optimizer.eps": 1e-6,
    },
)
CLASSIFICATION = ALL.plus(
    *("data.folder", *_HELD_OUT, "data.train.file", "data.train.text_field"),
    *("data.train.label_field", "data.train.pair_field", "data.train.header", *_TEXT_FILTERS),
    *_CORPORA,
    *_WORD_DISTILLATION,
    # The value of torch and of Hugging Face's Trainer.
    defaults={
        "training.label_smoothing": 0.0,
        "training.optimizer.betas": [0.9, 0.999],
        "training.optimizer.eps": 1e-8,
    },
)
SFT = ALL.plus(
    *("data.folder", *_HELD_OUT, "data.train.file", "data.train.messages_field"),
    *("data.train.prompt_field", "data.train.response_field", *_CORPORA),
    defaults={
        "data.max_length": 1_024,
        # Answers are learned with their line breaks and spaces.
        "tokenizer.kind": "byte_bpe",
        "tokenizer.normalization": "none",
        "training.label_smoothing": 0.0,
        "training.optimizer.betas": [0.9, 0.999],
        "training.optimizer.eps": 1e-8,
    },
)
DENOISING = TEXTS.plus(
    # Lewis et al. 2020, who train as Liu et al. 2019 do: their table 9.
    defaults={"training.label_smoothing": 0.0, "training.optimizer.eps": 1e-6},
)
BUILT_IN = {
    "translation": PAIRS,
    "language_modeling": LANGUAGE_MODELING,
    "sft": SFT,
    "masked_lm": MASKED_LM,
    "denoising": DENOISING,
    "classification": CLASSIFICATION,
    **dict.fromkeys(("copy", "reverse", "sort"), SYMBOLS),
}
