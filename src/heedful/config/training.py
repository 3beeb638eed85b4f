"""The section `training`: optimizer, schedule, batches, evaluations and the end of a run."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from heedful import plugins
from heedful.config.base import Seed, Strict
from heedful.errors import UserError

Decay = Annotated[float, Field(ge=0, lt=1)]
# The names that torch and the other commands have.
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Of heedful's schedules those that do not depend on the last step; a plugin's may.
SCHEDULES_WITHOUT_END = ("noam", "inverse_sqrt", "constant")
ScheduleName = Annotated[str, AfterValidator(plugins.schedule.check)]


class Optimizer(Strict):
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), Muon (Jordan et al. 2024)."""

    name: Literal["adam", "adamw", "muon"] = Field(
        "adam",
        description="Optimizer; muon updates the weight matrices of the blocks and AdamW all other "
        "parameters.",
    )
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.98),
        description="Decay rates per step of Adam's averages of the gradient and its square.",
    )
    eps: float = Field(1e-9, gt=0, description="Constant added to Adam's denominator.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay of matrices (adamw, muon), a multiple of the learning "
        "rate; 0: none.",
    )


Share = Annotated[float, Field(ge=0, le=1)]


class TextNoise(Strict):
    """Noise in the texts of training pairs, so that other writing does not break a translator."""

    upper: Share = Field(0.0, description="Share of the pairs in capitals on both sides.")
    title: Share = Field(
        0.0, description="Share of the pairs whose words begin with capitals on both sides."
    )
    no_stop: Share = Field(
        0.0, description="Share of the pairs without the marks that end both sides."
    )
    typos: Share = Field(
        0.0,
        description="Share of the pairs with typing errors in a tenth of the words of the source, "
        "at least in one.",
    )

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.upper + self.title > 1:
            raise UserError(
                f"upper {self.upper} and title {self.title} are shares of the same pairs: their "
                "sum may be at most 1"
            )
        return self

    @property
    def is_on(self) -> bool:
        """True if any pair may have noise."""
        return any((self.upper, self.title, self.no_stop, self.typos))


class Schedule(Strict):
    """The learning rate at every step; see `training/schedules.py` for the formulas."""

    name: ScheduleName = Field(
        "inverse_sqrt",
        description="Schedule of the learning rate after warm-up: noam, inverse_sqrt, cosine, "
        "linear, constant or a plugin's.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate, reached when warm-up ends; null: only for noam, which "
        "computes it from d_model and warmup_steps.",
    )
    warmup_steps: int = Field(
        1_000, ge=0, description="Steps over which the learning rate rises linearly from 0."
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Learning rate of cosine and linear at the last step, as a ratio of the peak.",
    )

    @model_validator(mode="after")
    def _check_min_lr_ratio(self) -> Self:
        if self.min_lr_ratio and self.name in SCHEDULES_WITHOUT_END:
            raise UserError(
                f"min_lr_ratio has no effect with {self.name}, whose rate does not depend on the "
                "last step; set it to 0, or use cosine or linear"
            )
        return self


class Training(Strict):
    """Optimizer steps, evaluations, checkpoints and the end of a run."""

    seed: Seed = Field(1, description="Random seed of weights, dropout and the order of the data.")
    device: str = Field(
        "auto", description="Device to train on: cpu, cuda, mps, or auto for the fastest present."
    )
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        BeforeValidator(lambda name: _PRECISIONS.get(str(name), name)),
    ] = Field(
        "auto",
        description="Precision of matrix products in training; fp16 scales the loss; auto: bf16 "
        "where the hardware is faster in it, else fp16 on a GPU and fp32 elsewhere, fixed when the "
        "run starts.",
    )
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps after which the run ends; null: no limit."
    )
    max_epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the training data after which the run ends; null: no limit.",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="Minutes of wall time after which the run ends; null: no limit."
    )
    batch_tokens: int | None = Field(
        4_096,
        ge=1,
        description="Maximum tokens per batch, of source and target, with padding; null: no limit.",
    )
    batch_sentences: int | None = Field(
        None,
        ge=1,
        description="Maximum pairs, texts or windows per batch, besides batch_tokens; null: no "
        "limit.",
    )
    gradient_accumulation: int = Field(
        1,
        ge=1,
        description="Batches per optimizer step; the gradient equals that of one large batch.",
    )
    batch_parts: int | None = Field(
        None,
        ge=1,
        description="Parts that the rows of each batch are divided into, one forward and backward "
        "pass each, with own random numbers for dropout; null: the least number that gives all "
        "processes of the run's first start equal shares, 1 for one process.",
    )
    parallel: Literal["auto", "none", "ddp", "fsdp"] = Field(
        "auto",
        description="Data parallelism of several processes (torchrun): ddp, each has the whole "
        "net, or fsdp, each has a shard of weights, gradients and optimizer state; none: refuse "
        "several processes; auto: ddp. Of these only auto has an effect for one process: heedful "
        "train on a CPU then measures, for a run of ten minutes or more, whether fewer threads are "
        "faster, and uses them.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Store only each block's input and recompute its activations in the backward "
        "pass: less memory, slower steps.",
    )
    compile: bool = Field(
        False,
        description="Compile the net's blocks with torch.compile for at most 8 padded batch "
        "shapes; meant for GPUs, no faster on a CPU (docs/log.md).",
    )
    optimizer: Optimizer = Field(
        default_factory=Optimizer, description="Optimizer and its settings."
    )
    schedule: Schedule = Field(default_factory=Schedule, description="Learning rate by step.")
    label_smoothing: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Probability mass spread evenly over the vocabulary in training targets; 0: "
        "none.",
    )
    r_drop: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence between two passes with different dropout "
        "(R-Drop); 0: one pass.",
    )
    word_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability that an input token is replaced by the mask or unknown token in "
        "training.",
    )
    subword_sampling: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Sample new subword splits each epoch: with bpe and byte_bpe the probability "
        "that a merge is skipped (BPE-dropout), with unigram the exponent of a split's "
        "probability; null: always the best split. A row whose sample is longer than max_length or "
        "batch_tokens keeps its best split.",
    )
    noise: TextNoise = Field(
        default_factory=TextNoise,
        description="Noise in the texts of translation pairs, other in each epoch; a pair keeps "
        "its texts where those with noise would be longer than max_length or batch_tokens, or have "
        "a character without a token.",
    )
    freeze: list[str] = Field(
        [],
        description="Parameters that are not trained, by patterns of their names, as embedding, "
        "encoder or blocks.0; empty: none.",
    )
    layer_lr_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Factor of the learning rate from each block to the one below it, and to the "
        "embeddings; 1: one rate for all.",
    )
    clip_norm: float | None = Field(
        1.0, gt=0, description="Maximum norm of the whole gradient; null: no clipping."
    )
    evaluate_every: int = Field(
        500, ge=1, description="Steps between evaluations, each of which saves a checkpoint."
    )
    checkpoint_every: int | None = Field(
        None,
        ge=1,
        description="Steps between further checkpoints to resume from; null: only at evaluations.",
    )
    checkpoint_every_minutes: float | None = Field(
        30.0,
        gt=0,
        description="Minutes after the last checkpoint at which a further one is saved; null: "
        "never.",
    )
    async_checkpoints: bool = Field(
        True,
        description="Write checkpoints in a thread while training goes on, from a copy of weights "
        "and optimizer state in the host's memory (with Adam three times the weights); false: "
        "training waits for them.",
    )
    log_every: int = Field(20, ge=1, description="Steps between lines of the training log.")
    patience: int | None = Field(
        None,
        ge=1,
        description="Evaluations without improvement after which the run ends (early stopping); "
        "null: never.",
    )
    average_checkpoints: int = Field(
        1,
        ge=1,
        description="Number of checkpoints kept, whose mean becomes the model if it scores better "
        "than the best one; 1: no mean.",
    )
    average_of: Literal["last", "best"] = Field(
        "last",
        description="Checkpoints that average_checkpoints keeps: the last ones, or the best by "
        "evaluation.metric.",
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay per step of an exponential moving average of the weights, which is "
        "evaluated and saved in place of them; null: no average.",
    )
    tensorboard: bool = Field(
        False, description="Write TensorBoard event files (pip install 'heedful[tensorboard]')."
    )

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        if self.average_of == "best" and self.average_checkpoints == 1:
            raise UserError(
                "average_of: best has no effect without a mean; set average_checkpoints to 2 or "
                "more"
            )
        return self
