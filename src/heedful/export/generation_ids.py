"""What begins and ends a generated text, from and to the Hugging Face format."""

from typing import Any

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.export.hf_directory import CONFIG, GENERATION_CONFIG, HfDirectory
from heedful.pipelines import GenerationIds, Generator, Translator

# The ids that transformers' own class of a model type stands for where no file says any.
_CLASS_IDS: dict[str, dict[str, int]] = {
    "bart": {"bos": 0, "eos": 2, "pad": 1},
    "gemma3_text": {"bos": 2, "eos": 1, "pad": 0},
    "gpt2": {"bos": 50256, "eos": 50256},
    "llama": {"bos": 1, "eos": 2},
    "marian": {"eos": 0, "pad": 58100},
    "mistral": {"bos": 1, "eos": 2},
    "mixtral": {"bos": 1, "eos": 2},
    "pegasus": {"eos": 1, "pad": 0},
    "t5": {"eos": 1, "pad": 0},
}
# Which of them a decoder of two stacks begins with, and which must end with the end mark.
_STARTS = {"bart": "eos", "marian": "pad", "pegasus": "pad", "t5": "pad"}
_ENDS_BY_FORCE = ("bart", "marian", "pegasus")
# Options of a generation and their names in transformers. Those of sampling count with `do_sample`.
_OPTIONS = {
    "beam_size": "num_beams",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
}
_DRAWING = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None, "typical_p": None}
_STOP_RULES = {False: "heuristic", True: "beam_full", "never": "optimal"}
_LEFT_OUT = ("min_length", "encoder_no_repeat_ngram_size", "begin_suppress_tokens")


def read_options(directory: HfDirectory) -> dict[str, Any]:
    """How a model generates where a call does not say: its own configuration, as over there."""
    rules = directory.generation_config or directory.config
    named = {ours: rules.get(theirs) for ours, theirs in _OPTIONS.items()}
    options = {name: value for name, value in named.items() if value is not None}
    options = {"beam_size": 1, "stop_rule": _STOP_RULES[rules.get("early_stopping") or False]} | (
        options
    )
    if rules.get("do_sample") and options["beam_size"] == 1:
        drawn = {name: rules.get(name, usual) for name, usual in _DRAWING.items()}
        drawn["top_k"] = drawn["top_k"] or None  # 0: no such rule
        options |= {name: value for name, value in drawn.items() if value is not None}
    return options


def read_generation_ids(
    directory: HfDirectory, kind: type[Generator], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[GenerationIds, list[str]]:
    """The ids of a model that writes, and notices of what is not taken over.

    Each is looked for in `generation_config.json`, `config.json`, the tokenizer, and what the
    family's class there takes for granted. Forced and forbidden tokens are those of
    `generation_config.json` alone where there is one, as there.

    Args:
        tokenizer: of what is written.
        vocab_size: of what is written; an id beyond it can never be met.

    Raises:
        UserError: an id that is none.
    """
    generation, config = directory.generation_config, directory.config
    family, rules = str(config["model_type"]), generation or config
    words = rules.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise UserError(f"{GENERATION_CONFIG}: bad_words_ids must be lists of ids, not {words!r}")

    def said(key: str) -> list[int]:
        return _ids(key, generation.get(key)) or _ids(key, config.get(key))

    def role(name: str) -> list[int]:
        own = None if tokenizer is None else getattr(tokenizer.specials, f"{name}_id")
        taken = _CLASS_IDS.get(family, {}).get(name, vocab_size)
        known = [own] if own is not None else [taken] if taken < vocab_size else []
        return said(f"{name}_token_id") or known

    single = [word[0] for word in words if len(word) == 1] + (rules.get("suppress_tokens") or [])
    found = {"end": role("eos"), "never": sorted(set(_ids("bad_words_ids", single)))}
    if issubclass(kind, Translator):
        found["start"] = (said("decoder_start_token_id") or role(_STARTS[family]))[:1]
        found["first"] = _ids("forced_bos_token_id", rules.get("forced_bos_token_id"))
        found["last"] = _ids("forced_eos_token_id", rules.get("forced_eos_token_id"))
        silent = not generation and "forced_eos_token_id" not in config
        if silent and family in _ENDS_BY_FORCE:
            found["last"] = found["end"]
    else:
        found["start"] = role("bos") if tokenizer is None else list(tokenizer.prefix_ids)
    kept = {key: tuple(id for id in ids if id < vocab_size) for key, ids in found.items()}
    first, last = (next(iter(kept.get(key, ())), None) for key in ("first", "last"))
    ids = GenerationIds(kept["start"], kept["end"], kept["never"], first, last)
    notices = []
    if beyond := {id for ids in found.values() for id in ids if id >= vocab_size}:
        listed = ", ".join(map(str, sorted(beyond)))
        notices.append(f"left out: the token {listed}, beyond the model's {vocab_size:,} ids")
    options = [f"{key} {rules[key]!r}" for key in _LEFT_OUT if rules.get(key)]
    if any(len(word) != 1 for word in words):
        options.append("bad_words_ids of several tokens")
    if options:
        notices.append(f"options of each call here, not taken over: {', '.join(options)}")
    return ids, notices


def generation_to_hf(model: Any, model_type: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `config.json` and `generation_config.json` say of ids; None: the model does not write.

    The ids of roles are in both, as far as they are known.
    """
    specials = model.tgt_tokenizer.specials if model.has_tokenizer else None
    content: dict[str, Any] = {
        f"{role}_token_id": getattr(specials, f"{role}_id", None) for role in ("bos", "eos", "pad")
    }
    if not isinstance(model, Generator):
        return content, None
    ids = model.ids
    if ids.eos_ids:
        content["eos_token_id"] = ids.eos_ids[0] if len(ids.eos_ids) == 1 else list(ids.eos_ids)
    if specials is None and ids.decoder_start_ids:
        # A bare net begins with padding in some families, and with the start mark in others.
        role = {**_STARTS, "bart": None}.get(model_type, "bos")
        if role is not None:
            content[f"{role}_token_id"] = ids.decoder_start_ids[0]
    more = _options_there(model)
    if isinstance(model, Translator):
        assert len(ids.decoder_start_ids) <= 1, (
            f"the format has one first token, not {ids.decoder_start_ids}"
        )
        content["decoder_start_token_id"] = next(iter(ids.decoder_start_ids), None)
        content |= {
            "forced_bos_token_id": ids.forced_bos_id,
            "forced_eos_token_id": ids.forced_eos_id,
        }
        more["max_length"] = model.config.max_length  # twenty tokens would be written otherwise
    if ids.suppressed_ids:
        more["bad_words_ids"] = [[token] for token in ids.suppressed_ids]
    return content, {k: v for k, v in {**content, **more}.items() if v is not None}


def _options_there(model: Generator) -> dict[str, Any]:
    """How a model generates by itself, in the names of `generation_config.json`."""
    options = model.options()
    settings = {theirs: getattr(options, ours) for ours, theirs in _OPTIONS.items()}
    rules = {ours: theirs for theirs, ours in _STOP_RULES.items()}
    if (options.beam_size or 1) > 1:
        settings["early_stopping"] = rules[options.stop_rule or "optimal"]
    if options.samples:
        settings["do_sample"] = True
        settings |= {name: getattr(options, name) for name in _DRAWING}
        settings["top_k"] = options.top_k or 0  # left out, transformers would take 50
    usual = {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
    return {key: value for key, value in settings.items() if value != usual.get(key)}


def _ids(key: str, value: Any) -> list[int]:
    """One id or several; a negative one stands for none."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise UserError(f"{CONFIG} or {GENERATION_CONFIG}: {key} must be an id, not {value!r}")
    return [token for token in listed if token >= 0]
