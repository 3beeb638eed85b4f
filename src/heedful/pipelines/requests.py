"""Requests to backends: the ids of a model, and constraints on outputs that are given as texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from heedful.backends.base import GenerationRequest
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.option_ranges import plain_number
from heedful.options import Options
from heedful.pipelines.base import SavedModel


def without_rows(model: Any, options: Options) -> GenerationRequest:
    """The request of no prompts: the fields that all prompts of a call share.

    Args:
        model: a `Generator`.

    Raises:
        UserError: ids outside the vocabulary; a text that no output can contain; a draft of
            another kind.
    """
    ids, draft = model.ids, options.draft
    banned = [_as_list(entry) for entry in options.banned if not isinstance(entry, str)]
    texts = [entry for entry in options.banned if isinstance(entry, str)]
    model.check_ids([*banned, list(options.stop_ids)], "tgt_")
    banned = [*map(list, ids.suppressed_sequences), *banned]
    required = [
        _required_ids(phrase, texts, model.tgt_tokenizer)
        if isinstance(phrase, str)
        else _as_list(phrase)
        for phrase in options.require
    ]
    model.check_ids(required, "tgt_")
    end_ids = ids.eos_ids if options.stop_ids else model.end_ids()
    suppressed_ids = ids.suppressed_ids
    if options.no_unknown and model.has_tokenizer and model.tgt_tokenizer.unk_id >= 0:
        suppressed_ids = (*suppressed_ids, model.tgt_tokenizer.unk_id)
    if isinstance(draft, SavedModel):
        if draft.kind != model.kind:
            raise UserError(f"draft must be a {model.kind}, not a {draft.kind}")
        draft = (draft.eager, options.draft.ids.decoder_start_ids)
    return GenerationRequest(
        options=options,
        decoder_start_ids=ids.decoder_start_ids,
        eos_ids=tuple(dict.fromkeys((*end_ids, *options.stop_ids))),
        suppressed_ids=suppressed_ids,
        forced_bos_id=model.first_id(options),
        forced_eos_id=ids.forced_eos_id,
        bad_words_ids=banned,
        banned_texts=_banned_texts(texts, model.tgt_tokenizer) if texts else None,
        required_ids=required,
        max_length=model.config.max_length,
        draft=draft,
        decoder=model.tgt_tokenizer.decoder if model.has_tokenizer else None,
        max_new_tokens=[],
        prompt_numbers=[],
        output_prefixes=None,
        seeds=None,
    )


def prefixes_of(model: Any, numbers: Sequence[int], options: Options) -> list[list[int]] | None:
    """The ids that the outputs of some prompts begin with, by their index; None: any.

    Args:
        model: a `Generator`.

    Raises:
        UserError: as `prefix_ids`.
    """
    texts = options.prefixes
    if texts is None:
        return None
    return [prefix_ids(texts[number], options.banned, model.tgt_tokenizer) for number in numbers]


def check_limits(limits: Sequence[int], numbers: Sequence[int], options: Options) -> None:
    """Raise UserError for a prompt whose limit of new tokens is below `min_new_tokens`.

    Args:
        limits: of some prompts.
        numbers: their index among all prompts.
    """
    least = options.min_new_tokens or 0
    if least > (shortest := min(limits, default=least)):
        index = numbers[limits.index(shortest)]
        raise UserError(
            f"prompt {options.number(index)} may have {shortest} new tokens, but min_new_tokens is "
            f"{least}: ask for fewer, or set max_new_tokens"
        )


def options_for_ids(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a search from ids that `prompt_ids` made of texts with these options.

    Without the languages that the ids have a token of.

    Args:
        model: a `Generator`.
    """
    in_ids = {"src_language"}
    if not model.metadata.language_codes:
        in_ids |= {"tgt_language"}
    return {name: value for name, value in options.items() if name not in in_ids}


def prefix_ids(prefix: str, banned: Sequence[Any], tokenizer: Tokenizer) -> list[int]:
    """The ids of the beginning of an output; raises UserError for one that no output can have.

    Args:
        banned: `Options.banned`.
    """
    texts = [entry for entry in banned if isinstance(entry, str)]
    return _possible_ids("prefix", prefix, texts, tokenizer)


def _required_ids(phrase: str, banned: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The ids of a required phrase; raises UserError for one that no output can contain.

    Args:
        banned: texts that no output contains.
    """
    ids = _possible_ids("required phrase", phrase, banned, tokenizer)
    if not ids:
        raise UserError(f"the required phrase {phrase!r} is empty: give it a text")
    return ids


def _banned_texts(texts: list[str], tokenizer: Tokenizer) -> Any:
    """The rule that keeps texts out of outputs."""
    from heedful.generation.token_rules import BannedTexts

    tokenizer.encode_batch(texts)  # refuses lone surrogates
    return BannedTexts(texts, tokenizer.token_texts)


def _possible_ids(noun: str, text: str, banned: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text)
    if tokenizer.unk_id in ids:
        raise UserError(
            f"no output can contain the {noun} {text!r}: the tokenizer has no tokens for a part of "
            f"it; without that part it is {tokenizer.decode(ids)!r}"
        )
    if found := next((part for part in banned if part in tokenizer.decode(ids)), None):
        raise UserError(f"the {noun} {text!r} contains {found!r}, which is banned")
    return ids


def _as_list(ids: int | Sequence[int]) -> list[int]:
    ids = plain_number(ids)
    return [ids] if isinstance(ids, int) else list(ids)
