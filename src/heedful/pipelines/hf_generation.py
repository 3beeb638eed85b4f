"""Special token ids and generation options, from and to the Hugging Face format."""

from typing import Any

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.pipelines.metadata import GenerationIds
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.zoo.hf_directory import CONFIG, GENERATION_CONFIG, HfDirectory

# Defaults of the configuration classes in transformers, by model type.
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
# The role of the decoder's start token, and the model types that force EOS at the maximum length.
_START_ROLES = {"bart": "eos", "marian": "pad", "pegasus": "pad", "t5": "pad"}
_FORCED_EOS = ("bart", "marian", "pegasus")
# Names of generation options in transformers.
_OPTIONS = {
    "beam_size": "num_beams",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
}
# Options of sampling, which transformers uses if `do_sample` is true, and their defaults there.
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None, "typical_p": None}
_STOP_RULES = {False: "heuristic", True: "beam_full", "never": "optimal"}  # of `early_stopping`
_NOT_IMPORTED = ("min_length", "encoder_no_repeat_ngram_size", "begin_suppress_tokens")


def read_options(directory: HfDirectory) -> dict[str, Any]:
    """The default generation options of a model, as `generate` of transformers has them."""
    rules = directory.generation_config or directory.config
    values = {name: rules.get(hf_name) for name, hf_name in _OPTIONS.items()}
    options = {name: value for name, value in values.items() if value is not None}
    options = {"beam_size": 1, "stop_rule": _STOP_RULES[rules.get("early_stopping") or False]} | (
        options
    )
    if rules.get("do_sample") and options["beam_size"] == 1:
        sampling = {name: rules.get(name, default) for name, default in _SAMPLING.items()}
        sampling["top_k"] = sampling["top_k"] or None  # 0: disabled
        options |= {name: value for name, value in sampling.items() if value is not None}
    return options


def read_generation_ids(
    directory: HfDirectory, kind: type[Generator], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[GenerationIds, list[str]]:
    """The special token ids of a generative model, and notices of settings that are not imported.

    Sources, by precedence: `generation_config.json`, `config.json`, the tokenizer, and the defaults
    of the configuration class. Forced and suppressed tokens are read from `generation_config.json`
    only, if it exists, as in transformers.

    Args:
        tokenizer: the tokenizer of the output.
        vocab_size: the vocabulary size of the output; ids beyond it are left out.

    Raises:
        UserError: an id that is not an integer.
    """
    generation, config = directory.generation_config, directory.config
    family, rules = str(config["model_type"]), generation or config
    words = rules.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise UserError(f"{GENERATION_CONFIG}: bad_words_ids must be lists of ids, not {words!r}")

    def configured(key: str) -> list[int]:
        return _ids(key, generation.get(key)) or _ids(key, config.get(key))

    def role(name: str) -> list[int]:
        token_id = None if tokenizer is None else getattr(tokenizer.specials, f"{name}_id")
        default = _CLASS_IDS.get(family, {}).get(name, vocab_size)
        fallback = [token_id] if token_id is not None else [default] if default < vocab_size else []
        return configured(f"{name}_token_id") or fallback

    single = [word[0] for word in words if len(word) == 1] + (rules.get("suppress_tokens") or [])
    read = {
        "eos_ids": role("eos"),
        "suppressed_ids": sorted(set(_ids("bad_words_ids", single))),
    }
    if issubclass(kind, Translator):
        read["decoder_start_ids"] = (
            configured("decoder_start_token_id") or role(_START_ROLES[family])
        )[:1]
        read["forced_bos_id"] = _ids("forced_bos_token_id", rules.get("forced_bos_token_id"))
        read["forced_eos_id"] = _ids("forced_eos_token_id", rules.get("forced_eos_token_id"))
        is_default = not generation and "forced_eos_token_id" not in config
        if is_default and family in _FORCED_EOS:
            read["forced_eos_id"] = read["eos_ids"]
    else:
        read["decoder_start_ids"] = role("bos") if tokenizer is None else list(tokenizer.prefix_ids)
    valid = {key: tuple(id for id in ids if id < vocab_size) for key, ids in read.items()}
    ids = GenerationIds(
        decoder_start_ids=valid["decoder_start_ids"],
        eos_ids=valid["eos_ids"],
        suppressed_ids=valid["suppressed_ids"],
        forced_bos_id=next(iter(valid.get("forced_bos_id", ())), None),
        forced_eos_id=next(iter(valid.get("forced_eos_id", ())), None),
    )
    notices = []
    if beyond := {id for ids in read.values() for id in ids if id >= vocab_size}:
        numbers = ", ".join(map(str, sorted(beyond)))
        notices.append(f"left out: the token {numbers}, beyond the model's {vocab_size:,} ids")
    options = [f"{key} {rules[key]!r}" for key in _NOT_IMPORTED if rules.get(key)]
    if any(len(word) != 1 for word in words):
        options.append("bad_words_ids of several tokens")
    if options:
        notices.append(f"not imported, pass them to each call instead: {', '.join(options)}")
    return ids, notices


def generation_to_hf(model: Any, model_type: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Special token ids for `config.json`, and the content of `generation_config.json`.

    `generation_config.json` has the same ids; its content is None for models that do not generate.
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
        # Without a tokenizer: the start token has the role that the model type starts with.
        role = {**_START_ROLES, "bart": None}.get(model_type, "bos")
        if role is not None:
            content[f"{role}_token_id"] = ids.decoder_start_ids[0]
    more = _hf_options(model)
    if isinstance(model, Translator):
        assert len(ids.decoder_start_ids) <= 1, (
            f"the format has one start token, not {ids.decoder_start_ids}"
        )
        content["decoder_start_token_id"] = next(iter(ids.decoder_start_ids), None)
        content |= {
            "forced_bos_token_id": ids.forced_bos_id,
            "forced_eos_token_id": ids.forced_eos_id,
        }
        more["max_length"] = model.config.max_length  # the default is 20 tokens
    if ids.suppressed_ids:
        more["bad_words_ids"] = [[token] for token in ids.suppressed_ids]
    return content, {k: v for k, v in {**content, **more}.items() if v is not None}


def _hf_options(model: Generator) -> dict[str, Any]:
    """The default generation options of a model, by their names in `generation_config.json`."""
    options = model.options()
    settings = {hf_name: getattr(options, name) for name, hf_name in _OPTIONS.items()}
    early_stopping = {rule: value for value, rule in _STOP_RULES.items()}
    if (options.beam_size or 1) > 1:
        settings["early_stopping"] = early_stopping[options.stop_rule or "optimal"]
    if options.samples:
        settings["do_sample"] = True
        settings |= {name: getattr(options, name) for name in _SAMPLING}
        settings["top_k"] = options.top_k or 0  # the default of transformers is 50
    defaults = {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
    return {key: value for key, value in settings.items() if value != defaults.get(key)}


def _ids(key: str, value: Any) -> list[int]:
    """The ids of a value, which is an id, a list of ids or None; without negative ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{CONFIG} or {GENERATION_CONFIG}: {key} must be an id, not {value!r}")
    return [token for token in ids if token >= 0]
