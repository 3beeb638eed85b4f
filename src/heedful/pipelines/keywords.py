"""Completion of models in editors: the types of keywords, and the names that are not listed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from heedful.backends.manifest import Use
from heedful.backends.registry import BackendName, Precision
from heedful.options import Normalization, StopRule, TooLong

# Methods that other packages of heedful call, and users need not: `dir` leaves them out.
INTERNAL = frozenset(
    (
        *("backend_for", "backend_for_row", "backend_with", "batches", "chat_encoder", "chat_rows"),
        *("check_ids", "check_lengths", "classify_rows", "completed"),
        *("default_options", "encode_pairs", "file_writer", "fill_rows", "first_id", "generations"),
        *("ids_with_masks", "kept", "leave_out", "length_limit", "masked_rows", "note_once"),
        *("report_failure", "request", "request_of_batch", "request_with", "rows_of"),
        *("stream_with", "target_ids"),
    )
)


class LoadKeywords(TypedDict, total=False):
    """The keywords of `heedful.load`."""

    device: str
    backend: BackendName | str
    precision: Precision | str
    threads: int | None
    use: Use
    trust_compiled: bool


class ClassificationKeywords(TypedDict, total=False):
    """The keywords of `Classifier.class_logits`; one text has one text of `pairs`."""

    pairs: str | Sequence[str] | None
    too_long: TooLong
    batch_tokens: int | None
    progress: Callable[[int], None] | None


class GenerationKeywords(TypedDict, total=False):
    """The fields of `heedful.options.Options`, which describes them."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    beam_size: int | None
    num_return: int
    length_penalty: float | None
    normalization: Normalization | None
    stop_rule: StopRule | None
    num_groups: int
    diversity_penalty: float
    coverage_penalty: float
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_h: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    min_tokens_to_keep: int
    seed: int | Sequence[int] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_repetition_penalty: float | None
    encoder_no_repeat_ngram_size: int | None
    sequence_bias: Sequence[tuple[Sequence[int], float]] | None
    exponential_decay_length_penalty: Sequence[float] | None
    begin_suppress_tokens: Sequence[int] | None
    renormalize_logits: bool | None
    banned: Sequence[str | int | Sequence[int]]
    require: Sequence[str | Sequence[int]]
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    src_language: str | None
    tgt_language: str | None
    no_unknown: bool
    keep: bool
    glossary: Any
    stop: Sequence[str] | None
    stop_ids: Sequence[int]
    draft: Any
    num_draft_tokens: int
    prefixes: Sequence[str] | None
    forced: Mapping[int, int] | None
    prefix_function: Callable[[int, list[int]], Sequence[int]] | None
    shortlist: bool
    scores: bool
    too_long: TooLong
    first_number: int
    numbers: Sequence[int] | None
    batch_tokens: int | None
    progress: Callable[[int], None] | None
    on_output: Callable[[int, list[Any]], None] | None
