"""What begins and ends a generated text, from and to the Hugging Face format."""

from collections.abc import Mapping
from typing import Any

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.export.hf_directory import CONFIG, GENERATION_CONFIG, HfDirectory
from heedful.inference import GenerationIds, LanguageModel, Translator, Writer

# The ids that transformers' own class of a model type stands for where no file says any.
_CLASS_IDS: dict[str, dict[str, int]] = {
    "bart": {"bos": 0, "eos": 2, "pad": 1},
    "gpt2": {"bos": 50256, "eos": 50256},
    "llama": {"bos": 1, "eos": 2},
    "marian": {"eos": 0, "pad": 58100},
    "mistral": {"bos": 1, "eos": 2},
    "t5": {"eos": 1, "pad": 0},
}
# Which of them a decoder hears first, and which families must end with the end mark.
_STARTS = {"bart": "eos", "marian": "pad", "t5": "pad"}
_ENDS_BY_FORCE = ("bart", "marian")
# How one generates is an option of each call here, not a property of the model.
_OPTIONS = (
    "do_sample",
    "num_beams",
    "early_stopping",
    "length_penalty",
    "min_length",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "begin_suppress_tokens",
)


def read_generation_ids(
    directory: HfDirectory, kind: type[Writer], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[GenerationIds, list[str]]:
    """The ids of a model that writes, and notices of what is not taken over.

    Each is looked for in `generation_config.json`, `config.json`, the tokenizer, and what the
    family's class over there takes for granted. Forced and forbidden tokens are those of
    `generation_config.json` alone where there is one, as over there.

    Args:
        tokenizer: of what is written.
        vocab_size: of what is written; an id beyond it can never be met.

    Raises:
        UserError: an id that is none.
    """
    family = str(directory.config["model_type"])
    seen = _Seen(directory, tokenizer, family, vocab_size)
    eos, pad, bos = (seen.role(role) for role in ("eos", "pad", "bos"))
    rules = directory.generation_config or directory.config
    never, left_out = _never(rules, seen)
    if not issubclass(kind, Translator):
        start = seen.kept(bos) if tokenizer is None else tokenizer.prefix_ids
        ids = GenerationIds(start=start, end=seen.kept(eos), never=never)
        return ids, seen.notices + left_out
    begins = seen.said("decoder_start_token_id")
    if not begins:
        begins = {"eos": eos, "pad": pad}[_STARTS[family]]
    last = _ids(rules.get("forced_eos_token_id"), "forced_eos_token_id")
    silent = "forced_eos_token_id" not in rules and not directory.generation_config
    if silent and family in _ENDS_BY_FORCE:
        last = eos
    first = seen.kept(_ids(rules.get("forced_bos_token_id"), "forced_bos_token_id"))
    kept = seen.kept(last)
    ids = GenerationIds(
        start=seen.kept(begins[:1]),
        end=seen.kept(eos),
        never=never,
        first=first[0] if first else None,
        last=kept[0] if kept else None,
    )
    return ids, seen.notices + left_out


def role_ids(model: Any) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of a model, as far as they are known."""
    specials = model.tgt_tokenizer.specials if model.has_tokenizer else None
    found: dict[str, Any] = {
        f"{role}_token_id": getattr(specials, f"{role}_id", None) for role in ("bos", "eos", "pad")
    }
    if not isinstance(model, Writer):
        return found
    ids = model.ids
    if ids.end:
        found["eos_token_id"] = ids.end[0] if len(ids.end) == 1 else list(ids.end)
    if specials is None and ids.start:
        # What a bare net hears first is padding for some families, and the start mark for others.
        role = {"bart": None, "marian": "pad", "t5": "pad"}.get(model.card.architecture, "bos")
        if role is not None:
            found[f"{role}_token_id"] = ids.start[0]
    return found


def generation_settings(model: Any) -> dict[str, Any] | None:
    """What `generation_config.json` says of a model; None for one that does not write."""
    if not isinstance(model, Writer):
        return None
    ids = model.ids
    settings = {key: value for key, value in role_ids(model).items() if value is not None}
    if isinstance(model, Translator):
        settings |= decoder_ids(model)
        # Twenty tokens would be written otherwise.
        settings["max_length"] = model.config.max_length
    else:
        assert isinstance(model, LanguageModel)
    if ids.never:
        settings["bad_words_ids"] = [[token] for token in ids.never]
    return {key: value for key, value in settings.items() if value is not None}


def decoder_ids(model: Translator) -> dict[str, int | None]:
    """What a decoder of two stacks begins with and is forced to write."""
    ids = model.ids
    assert len(ids.start) <= 1, f"the format has one first token, not {ids.start}"
    return {
        "decoder_start_token_id": ids.start[0] if ids.start else None,
        "forced_bos_token_id": ids.first,
        "forced_eos_token_id": ids.last,
    }


class _Seen:
    """Looks ids up, and remembers those that the model has no row for."""

    def __init__(
        self, directory: HfDirectory, tokenizer: Tokenizer | None, family: str, vocab_size: int
    ) -> None:
        self._contents = (directory.generation_config, directory.config)
        self._tokenizer = tokenizer
        self._class_ids = _CLASS_IDS.get(family, {})
        self._vocab_size = vocab_size
        self._beyond: set[int] = set()

    @property
    def notices(self) -> list[str]:
        """A line on ids that were left out."""
        if not self._beyond:
            return []
        listed = ", ".join(map(str, sorted(self._beyond)))
        return [f"left out: the token {listed}, beyond the model's {self._vocab_size:,} ids"]

    def said(self, key: str) -> tuple[int, ...]:
        """What the first file that says anything says."""
        for content in self._contents:
            if content.get(key) is not None:
                return _ids(content[key], key)
        return ()

    def role(self, role: str) -> tuple[int, ...]:
        """The ids of a role, of which eos may have several."""
        found = self.said(f"{role}_token_id")
        if found:
            return found
        own = None if self._tokenizer is None else getattr(self._tokenizer.specials, f"{role}_id")
        if own is not None:
            return (own,)
        taken = self._class_ids.get(role)
        return () if taken is None or taken >= self._vocab_size else (taken,)

    def kept(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Those that the model has a row for."""
        self._beyond |= {token for token in ids if token >= self._vocab_size}
        return tuple(token for token in ids if token < self._vocab_size)


def _never(rules: Mapping[str, Any], seen: _Seen) -> tuple[tuple[int, ...], list[str]]:
    """Single tokens that may not be written, and a notice of the rules that are left out."""
    words = rules.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise UserError(f"{GENERATION_CONFIG}: bad_words_ids must be lists of ids, not {words!r}")
    single = {word[0] for word in words if len(word) == 1}
    single |= set(rules.get("suppress_tokens") or [])
    never = seen.kept(tuple(sorted(_ids(sorted(single), "bad_words_ids"))))
    listed = [f"{key} {rules[key]!r}" for key in _OPTIONS if rules.get(key) not in (None, False)]
    if any(len(word) != 1 for word in words):
        listed.append("bad_words_ids of several tokens")
    if not listed:
        return never, []
    return never, [f"options of each call here, not taken over: {', '.join(listed)}"]


def _ids(value: Any, key: str) -> tuple[int, ...]:
    """One id or several; a negative one stands for none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise UserError(f"{CONFIG} or {GENERATION_CONFIG}: {key} must be an id, not {value!r}")
    return tuple(token for token in listed if token >= 0)
