"""The recipe: everything that a training run depends on, strict, typed, each key described once.

How one is read, and what is said of a wrong one, is in `recipe_files.py`.
"""

from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_jsonable_python

from heedful import plugins
from heedful.errors import UserError
from heedful.nested_keys import keys_of, put, set_keys
from heedful.plugins import Registry, nearest
from heedful.task_keys import BUILT_IN, TaskKeys

# Metrics that need no decoded text, and whether higher is better; macro_f1 is of classification.
OWN_METRICS = {"loss": False, "token_accuracy": True, "accuracy": True, "macro_f1": True}


class Strict(BaseModel):
    """Frozen, and without unknown keys or numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Decay = Annotated[float, Field(ge=0, lt=1)]
BeamSize = Annotated[int, Field(ge=1, le=1_000)]


def _check_size(size: int | float | None) -> int | float | None:
    if size is None or 0 < size < 1 or (size >= 1 and isinstance(size, int)):
        return size
    raise UserError(f"give a number of rows, or a share between 0 and 1, not {size}")


ValidSize = Annotated[int | float | None, AfterValidator(_check_size)]
Paths = str | list[str] | None
FieldName = int | str | None


class Files(Strict):
    """Where examples are read from (.gz or not)."""

    src: Paths = Field(None, description="sentence pairs: the sources, a file or a list of files")
    tgt: Paths = Field(None, description="and line by line their targets")
    file: Paths = Field(
        None,
        description="or pairs, labelled texts: .tsv, .jsonl, .parquet or a folder of `datasets`",
    )
    text: Paths = Field(
        None, description="texts: plain, .tsv, .jsonl, .parquet or a folder of `datasets`"
    )
    src_field: FieldName = Field(
        None, description="column number or name of the source; null: the first, or `src`"
    )
    tgt_field: FieldName = Field(None, description="of its target; null: the second, or `tgt`")
    text_field: FieldName = Field(
        None, description="column number or name of the text; null: the first, or `text`"
    )
    label_field: FieldName = Field(None, description="of its label; null: the second, or `label`")
    pair_field: FieldName = Field(None, description="of a second text, for pairs; null: none")

    def paths(self) -> list[str]:
        """All files and folders that are named."""
        named = (self.src, self.tgt, self.file, self.text)
        lists = ([paths] if isinstance(paths, str) else paths or [] for paths in named)
        return [path for paths in lists for path in paths]


class Generated(Strict):
    """Sizes of the data that the tasks dates, copy, reverse and sort make themselves."""

    num_train: int = Field(10_000, ge=1, description="examples to train on")
    num_valid: int = Field(1_000, ge=1, description="held out")
    num_test: int = Field(1_000, ge=1, description="scored at the end")
    num_symbols: int = Field(10, ge=2, description="copy, reverse, sort: different symbols")
    min_length: int = Field(10, ge=1, description="and how many stand in a sequence at least")
    max_length: int = Field(10, ge=1, description="and at most")
    seed: Seed = Field(1, description="of the examples")


class Data(Strict):
    """Where the examples come from and which of them are used."""

    folder: str | None = Field(
        None, description="where paths of train, valid and test begin; null: the current folder"
    )
    train: Files = Field(default_factory=Files, description="what is learnt from")
    valid: Files = Field(
        default_factory=Files,
        description="held out; without it, some of train are; examples of train that are held out "
        "too are dropped and counted, but for texts of whole files",
    )
    test: Files = Field(
        default_factory=Files, description="scored at the end; without it, valid is"
    )
    valid_size: ValidSize = Field(
        None,
        description="held out of train where no valid is given: a number of rows, or below 1 a "
        "share of them, of plain texts the last ones, by characters; null: 1,000 rows or, where "
        "fewer, a tenth; of plain texts 0.1",
    )
    text_unit: Literal["line", "paragraph", "file"] = Field(
        "line", description="what one plain text is (a paragraph: between blank lines)"
    )
    generated: Generated = Field(
        default_factory=Generated, description="data that a task makes itself"
    )
    src_language: str | None = Field(None, description="a code as en, for the record")
    tgt_language: str | None = Field(
        None, description="chooses how BLEU splits the target language"
    )
    max_length: int = Field(
        128, ge=2, description="tokens of a text, or of a side of a pair, special ones counted"
    )
    truncation: Literal["drop", "truncate", "error"] = Field(
        "drop", description="of longer texts; what is dropped or cut is counted"
    )


class TokenizerRecipe(Strict):
    """How text becomes ids: a new tokenizer, or one that is there already."""

    path: str | None = Field(
        None, description="one's own tokenizer, its file or folder; null: a new one, as follows"
    )
    kind: Literal["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte"] = Field(
        "bpe", description="how text is split"
    )
    vocab_size: Annotated[int, Field(ge=5, le=2**31 - 1)] | Literal["auto"] | None = Field(
        "auto",
        description="entries, special ones counted; auto: 8,000, or what little text gives; null: "
        "all (word, char, byte)",
    )
    joint: bool = Field(True, description="one tokenizer for both sides of pairs, or one a side")
    lowercase: bool = Field(False, description="cannot be undone in the output")
    keep_whitespace: bool = Field(
        False, description="line breaks and runs of spaces as they are, else one space"
    )
    normalization: Literal["nfc", "nfkc", "none"] = Field("nfkc", description="of Unicode")


class Optimizer(Strict):
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), Muon (Jordan et al. 2024)."""

    name: Literal["adam", "adamw", "muon"] = Field(
        "adam", description="the optimizer; muon: of the blocks' matrices, adamw of all else"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.98), description="decay of its two averages")
    eps: float = Field(1e-9, gt=0, description="added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="not of adam; matrices only")


def _of(registry: Registry, *more: str) -> AfterValidator:
    """Names of a registry; what is registered later is found too."""

    def check(name: str) -> str:
        if name not in more and name not in registry.names():
            raise UserError(f"unknown value {name}; {nearest(name, [*more, *registry.names()])}")
        return name

    return AfterValidator(check)


TaskName = Annotated[str, _of(plugins.task)]
ScheduleName = Annotated[str, _of(plugins.schedule)]
MetricName = Annotated[str, _of(plugins.metric, *OWN_METRICS)]


class Schedule(Strict):
    """The learning rate at every step; see `training/schedules.py` for the formulas."""

    name: ScheduleName = Field(
        "inverse_sqrt", description="noam, inverse_sqrt, cosine, linear or constant"
    )
    learning_rate: float | None = Field(
        None, gt=0, description="its height; null for noam, which follows from d_model and warm-up"
    )
    warmup_steps: int = Field(1_000, ge=0, description="steps of linear rise")
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="of the height, that cosine and linear end at"
    )


class Training(Strict):
    """How steps are taken, how often the run is looked at, and when it ends."""

    seed: Seed = Field(1, description="of weights, dropout and the order of the data")
    device: str = Field("auto", description="auto, cpu, cuda or mps")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="of products in training; fp16 scales the loss; auto: bf16 where it is native, "
        "else fp16 on a GPU and fp32 elsewhere, decided when the run begins and saved with it",
    )
    max_steps: int | None = Field(None, ge=1, description="the run ends at the first of max_steps,")
    max_epochs: int | None = Field(None, ge=1, description="max_epochs")
    max_minutes: float | None = Field(None, gt=0, description="and max_minutes; null: no such end")
    batch_tokens: int | None = Field(
        4_096, ge=1, description="tokens of a batch (both sides), padding counted; null: no limit"
    )
    batch_sentences: int | None = Field(
        None, ge=1, description="pairs, texts or windows of a batch at most; null: no limit"
    )
    gradient_accumulation: int = Field(
        1, ge=1, description="batches a step: the gradient is that of one large batch"
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep each block's input alone and compute the rest again for the gradient: "
        "less memory, longer steps",
    )
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: Schedule = Field(default_factory=Schedule)
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="of the targets, in training")
    r_drop: float = Field(
        0.0,
        ge=0,
        description="weight of the divergence of two passes with their own dropout; 0: one pass",
    )
    word_dropout: float = Field(
        0.0, ge=0, lt=1, description="chance of each token to be hidden while it is learnt from"
    )
    subword_sampling: float | None = Field(
        None,
        gt=0,
        le=1,
        description="split the words of training anew each epoch: bpe and byte_bpe leave out "
        "this share of merges, unigram draws by probability to this power; null: one way",
    )
    clip_norm: float | None = Field(1.0, gt=0, description="of the whole gradient; null: none")
    evaluate_every: int = Field(
        500, ge=1, description="steps between evaluations; a checkpoint is saved at each"
    )
    checkpoint_every: int | None = Field(
        None, ge=1, description="steps between further checkpoints, to resume from; null: none"
    )
    checkpoint_every_minutes: float | None = Field(
        30.0,
        gt=0,
        description="a further checkpoint is saved where the last is older than this; null: none",
    )
    log_every: int = Field(20, ge=1, description="steps")
    patience: int | None = Field(
        None, ge=1, description="evaluations without a better one, then the run ends; null: never"
    )
    average_checkpoints: int = Field(
        1, ge=1, description="checkpoints kept; their mean is taken if it is better than the best"
    )
    average_of: Literal["last", "best"] = Field(
        "last", description="which checkpoints these are: the last, or the best by evaluation"
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="judge and keep a moving average of the weights, which a step decays by this; "
        "null: the weights themselves",
    )
    tensorboard: bool = Field(
        False, description="also write TensorBoard's files (pip install heedful[tensorboard])"
    )


class Distillation(Strict):
    """Learning from a larger model's outputs; see `tasks/distillation.py` for the losses."""

    teacher: str | None = Field(None, description="the model to learn from (heedful distill)")
    level: Literal["word", "sequence"] = Field(
        "word", description="its probabilities of each token, or its own outputs (pairs only)"
    )
    temperature: float = Field(2.0, gt=0, description="softens what both say")
    distillation_weight: float = Field(5.0, ge=0, description="of what the teacher says")
    cross_entropy_weight: float = Field(2.0, ge=0, description="of the targets in the data")
    cosine_weight: float = Field(0.0, ge=0, description="of the angle between both models' states")
    copy_layers: bool = Field(
        False, description="begin as every k-th layer of the teacher; `model` says what differs"
    )
    beam_size: BeamSize = Field(4, description="of level sequence")
    include_references: bool = Field(
        False, description="of level sequence: learn from the targets in the data too"
    )
    select_by_chrf: bool = Field(
        False,
        description="of level sequence: of each beam the output most like the data's own, by chrF",
    )
    more_teachers: Paths = Field(
        None, description="of level sequence: more models from whose outputs it learns too"
    )
    back_translation_models: Paths = Field(
        None,
        description="of level sequence: one or more models of the other direction, from whose "
        "translations of the targets it learns too",
    )


class Evaluation(Strict):
    """What a run is judged by."""

    metric: MetricName = Field(
        "loss",
        description="by which the best model is chosen: loss, token_accuracy, accuracy, macro_f1 "
        "(classification), or of decoded text bleu, chrf, chrf++, ter, exact_match; the lowest "
        "loss or ter, the highest of the others",
    )
    decode_sentences: int = Field(
        200, ge=0, description="held-out sources that are really decoded each time"
    )
    beam_size: BeamSize = Field(1, description="1 is greedy")
    final_beam_size: BeamSize = Field(5, description="for the scores at the end")
    length_penalty: float = Field(
        1.0, description="exponent of the length that a sum of log-probabilities is divided by"
    )
    num_samples: int = Field(5, ge=0, description="outputs shown in log and report")


class Expectation(Strict):
    """Is my run right? The held-out loss that the recipe as it stands has at a step."""

    step: int = Field(ge=1, description="after which the held-out loss is compared")
    low: float = Field(description="from here")
    high: float = Field(description="to here it is as it should be")

    @model_validator(mode="after")
    def _low_first(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class Recipe(Strict):
    """A whole run. `model` has the architecture's own keys, `objective` the task's own.

    Raises:
        ValidationError (`parse_recipe`: UserError): a key or value that is wrong by itself or
            beside the others, a plugin that does not load.
    """

    plugins: list[str] = Field([], description="Python files that add tasks, models, ... by name")
    task: TaskName = Field("translation", description="what is learnt")
    init_from: str | None = Field(
        None, description="another model's folder to start from, with its sizes and tokenizer"
    )
    data: Data = Field(default_factory=Data)
    tokenizer: TokenizerRecipe = Field(default_factory=TokenizerRecipe)
    model: dict[str, Any] = Field(
        {}, description="architecture, a size of it, and any of its Config's keys"
    )
    objective: dict[str, Any] = Field({}, description="the task's own keys")
    training: Training = Field(default_factory=Training)
    distillation: Distillation = Field(default_factory=Distillation)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    expect: list[Expectation] = Field(
        [],
        description="is my run right? bands of the held-out loss, set aside by any `--set` that "
        "the loss hangs on; change nothing of the run",
    )

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, content: Any) -> Any:
        """Load the plugins, whose names the other keys may use; fill in the task's defaults."""
        if not isinstance(content, dict):
            return content
        listed = content.get("plugins")
        for path in listed if isinstance(listed, list) else []:
            plugins.load_plugin(str(path))
        name = content.get("task", cls.model_fields["task"].default)
        is_known = isinstance(name, str) and name in plugins.task.names()
        return task_keys(name).fill(content) if is_known else content

    @model_validator(mode="after")
    def _only_keys_that_the_task_reads(self) -> Self:
        keys = task_keys(self.task)
        for name in set_keys(self):
            if not keys.reads(name):
                raise UserError(keys.refusal(name, self.task))
        return self

    @model_validator(mode="after")
    def _rules(self) -> Self:
        """What keys say of each other."""
        training, evaluation = self.training, self.evaluation
        if training.max_steps is training.max_epochs is training.max_minutes is None:
            raise UserError("no end is set; give training.max_steps, max_epochs or max_minutes")
        if training.batch_tokens is None and training.batch_sentences is None:
            raise UserError("give training.batch_tokens or training.batch_sentences")
        if training.schedule.name in ("cosine", "linear") and (
            training.max_steps is training.max_epochs is None
        ):
            raise UserError(
                f"the schedule {training.schedule.name} ends with the run: give training.max_steps "
                "or max_epochs"
            )
        if self.data.valid_size is not None and self.data.valid.paths():
            raise UserError(
                "data.valid_size holds out part of data.train, but data.valid is given; leave one "
                "of them out"
            )
        if training.optimizer.name == "adam" and training.optimizer.weight_decay:
            raise UserError("training.optimizer: weight_decay is not Adam's; set name to adamw")
        if training.r_drop and self.distillation.teacher and self.distillation.level == "word":
            raise UserError(
                "training.r_drop and distillation of level word both replace the loss of a whole "
                "run; leave one out, or set distillation.level to sequence"
            )
        if evaluation.metric not in OWN_METRICS and not evaluation.decode_sentences:
            raise UserError(
                f"evaluation.metric {evaluation.metric} needs decoded text: raise decode_sentences"
            )
        return self

    def values(self) -> dict[str, Any]:
        """The value of each key that the task reads, as JSON, by the key's dotted name."""
        content = self.model_dump(mode="json")
        return {
            key.name: reduce(getitem, key.name.split("."), content)
            for key in keys_of(Recipe)
            if not key.is_section and task_keys(self.task).reads(key.name)
        }

    def to_yaml(self, *, differences: bool = False) -> str:
        """Each key that the task reads with its value, or only those that differ from defaults."""
        defaults = default_values(self.task) if differences else {}
        content: dict[str, Any] = {"task": self.task}
        for name, value in self.values().items():
            if not differences or value != defaults[name]:
                put(content, name, value)
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def task_keys(task: str) -> TaskKeys:
    """The keys that a task reads; a built-in task is not imported for it."""
    keys: TaskKeys = BUILT_IN.get(task) or plugins.task.get(task).recipe_keys
    return keys


def default_values(task: str) -> dict[str, Any]:
    """The default of each key, as JSON, by the key's dotted name, where a recipe has this task."""
    shared = {
        key.name: to_jsonable_python(key.field.get_default(call_default_factory=True))
        for key in keys_of(Recipe)
        if not key.is_section
    }
    return {**shared, **task_keys(task).defaults}
