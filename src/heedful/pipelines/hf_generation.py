"""Special token ids and generation options, from and to the Hugging Face format."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.generation.outputs import LengthScore
from heedful.generation.rules import RULES_BY_OPTION, sampling_rules
from heedful.options import DEFAULTS, SAMPLING_OPTIONS, Options
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.metadata import GenerationIds
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.zoo.hf import GENERATION_CONFIG, HfDirectory
from heedful.zoo.saved import CONFIG

# Defaults of the configuration classes in transformers, by model type.
_CLASS_IDS: dict[str, dict[str, int]] = {
    "bart": {"bos": 0, "eos": 2, "pad": 1},
    "gemma3_text": {"bos": 2, "eos": 1, "pad": 0},
    "gpt2": {"bos": 50256, "eos": 50256},
    "llama": {"bos": 1, "eos": 2},
    "m2m_100": {"bos": 0, "eos": 2, "pad": 1},
    "marian": {"eos": 0, "pad": 58100},
    "mbart": {"bos": 0, "eos": 2, "pad": 1},
    "mistral": {"bos": 1, "eos": 2},
    "mixtral": {"bos": 1, "eos": 2},
    "pegasus": {"eos": 1, "pad": 0},
    "t5": {"eos": 1, "pad": 0},
}
# The role of the decoder's start token, and the model types that force EOS at the maximum length.
_START_ROLES = {"bart": "eos", "m2m_100": "eos", "marian": "pad", "mbart": "eos"}
_START_ROLES |= {"pegasus": "pad", "t5": "pad"}
_FORCED_EOS = ("bart", "marian", "mbart", "pegasus")
# Names of generation options in transformers.
_OPTIONS = {
    "beam_size": "num_beams",
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "sequence_bias": "sequence_bias",
    "exponential_decay_length_penalty": "exponential_decay_length_penalty",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "renormalize_logits": "renormalize_logits",
}
# Options of sampling, which transformers uses if `do_sample` is true, and their defaults there.
_SAMPLING = {"temperature": 1.0, "top_k": 50} | dict.fromkeys(SAMPLING_OPTIONS[2:])
_STOP_RULES = {False: "heuristic", True: "beam_full", "never": "optimal"}  # of `early_stopping`
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# Options that are written by other names, or need no key: `batch_tokens` changes the speed alone.
_WRITTEN = {"max_new_tokens", "min_new_tokens", "stop", "stop_rule", "batch_tokens"}
_WRITTEN |= {"src_language", "tgt_language"}  # of the tokenizer and of the first id
# Settings that are read besides `_OPTIONS` and `_SAMPLING`.
_READ = frozenset(
    {
        *(*_OPTIONS.values(), *_SAMPLING, *_SPECIAL_IDS, "do_sample", "early_stopping"),
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings"),
        *("bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    }
)
# Settings that do not change which tokens an output has.
_WITHOUT_EFFECT = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
        *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "transformers_version", "is_assistant", "use_mtp", "speculation_type"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("max_matching_ngram_size", "assistant_early_exit", "prompt_lookup_num_tokens"),
    }
)
# Settings without a default in the metadata of a model: their value without effect, and the option
# of a call that does the same; "" if there is none.
_NOT_IMPORTED: dict[str, tuple[Any, str]] = {
    "num_return_sequences": (1, "num_return"),
    "num_beam_groups": (1, "num_groups"),
    "diversity_penalty": (0, "diversity_penalty"),
    "force_words_ids": (None, "require"),
    "constraints": (None, "require"),
    "forced_decoder_ids": (None, "forced"),
    "guidance_scale": (1, ""),
    "watermarking_config": (None, ""),
    "token_healing": (False, ""),
    "remove_invalid_values": (False, ""),
    "penalty_alpha": (0, ""),
    "dola_layers": (None, ""),
    "assistant_ensemble_weight": (None, ""),
    "max_time": (None, ""),
}
# Penalties that transformers applies to logits in greedy decoding and sampling.
_ON_LOGITS = (
    *("repetition_penalty", "encoder_repetition_penalty"),
    "exponential_decay_length_penalty",
)


def read_options(
    directory: HfDirectory,
    kind: type[Generator] = LanguageModel,
    longest: int | None = None,
    vocab_size: int | None = None,
    *,
    has_tokenizer: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """The default generation options of a model, as `generate` of transformers has them.

    Also returns notices of settings that are not imported, or have another effect here.

    Args:
        longest: positions of the net; None: no limit.
        vocab_size: the vocabulary size of the output; None: any.
        has_tokenizer: False: without one there are no stop strings.

    Raises:
        UserError: a value out of range.
    """
    rules = directory.generation_config or directory.config
    values = {name: rules.get(hf_name) for name, hf_name in _OPTIONS.items()}
    stop_rule = rules.get("early_stopping") or False
    if stop_rule not in _STOP_RULES:
        raise UserError(
            f"{GENERATION_CONFIG}: early_stopping must be false, true or never, not {stop_rule!r}"
        )
    options = {"beam_size": 1, "stop_rule": _STOP_RULES[stop_rule]}
    options |= {
        name: value for name, value in values.items() if value is not None and value is not False
    }
    lengths, notices = _read_lengths(rules, kind, longest)
    options |= lengths
    is_beam, samples = options["beam_size"] != 1, rules.get("do_sample")
    if samples and not is_beam:
        sampling = {name: rules.get(name, default) for name, default in _SAMPLING.items()}
        sampling["top_k"] = sampling["top_k"] or None  # 0: disabled
        options |= {name: value for name, value in sampling.items() if value is not None}
    if texts := rules.get("stop_strings"):
        if is_beam or not has_tokenizer:
            reason = "heedful's beam search does not have" if is_beam else "need a tokenizer"
            notices.append(f"not imported: stop_strings, which {reason}")
        else:
            options["stop"] = [texts] if isinstance(texts, str) else texts
            notices.append("outputs end before the stop_strings; those of transformers hold them")
    if first := options.get("begin_suppress_tokens"):
        ids = _ids("begin_suppress_tokens", first)
        options["begin_suppress_tokens"] = [i for i in ids if vocab_size is None or i < vocab_size]
    _check(options)
    return options, [*notices, *_notices(rules, options, bool(directory.generation_config))]


def _read_lengths(
    rules: Mapping[str, Any], kind: type[Generator], longest: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The limits of new tokens, EOS included, and notices of limits that count a prompt.

    The output of a translator in transformers has its start token, which counts there.
    """
    options, counting_prompt = {}, []
    is_translator = issubclass(kind, Translator)
    # At the net's own limit, which is always written where the default is lower, it has no effect.
    most, least = rules.get("max_length"), rules.get("min_length")
    limits = not (_is_count(most) and longest is not None and most >= longest)
    if most is not None and rules.get("max_new_tokens") is None and limits:
        if is_translator:
            options["max_new_tokens"] = most - 1 if _is_count(most) else most
        else:
            counting_prompt.append(f"max_length {most!r} (max_new_tokens)")
    if least and rules.get("min_new_tokens") is None:
        if is_translator:
            options["min_new_tokens"] = least
        else:
            counting_prompt.append(f"min_length {least!r} (min_new_tokens)")
    if (most := rules.get("max_new_tokens")) is not None:
        options["max_new_tokens"] = most
    if least := rules.get("min_new_tokens"):
        options["min_new_tokens"] = least + 1 if _is_count(least) else least
    names = ", ".join(counting_prompt)
    return options, [f"not imported, it counts the prompt: {names}"] if names else []


def _check(options: dict[str, Any]) -> None:
    """Raise UserError for options out of range, before a model with them is written."""
    try:
        settings = Options.from_keywords(options).with_defaults({})
        rules = {name: getattr(settings, name) for name in RULES_BY_OPTION if name in options}
        sampling_rules(**rules)
        LengthScore(length_penalty=settings.length_penalty or 0.0)
    except UserError as error:
        raise UserError(f"{GENERATION_CONFIG} (or {CONFIG}): {error}") from None


def _notices(rules: Mapping[str, Any], options: dict[str, Any], is_own_file: bool) -> list[str]:
    """Notices of settings that are not imported, or have another effect here.

    Args:
        is_own_file: the settings are those of `generation_config.json`, which has no others.
    """
    set_here = {
        key: rules[key]
        for key, (idle, _option) in _NOT_IMPORTED.items()
        if rules.get(key) not in (None, idle)
    }
    equal = {key: _NOT_IMPORTED[key][1] for key in set_here}  # the option; "" for none
    by_option = [f"{key} {set_here[key]!r} ({option})" for key, option in equal.items() if option]
    others = [f"{key} {set_here[key]!r}" for key, option in equal.items() if not option]
    if options["beam_size"] != 1 and rules.get("do_sample"):
        others.append("do_sample in a beam search")
    known = _READ | _WITHOUT_EFFECT | _NOT_IMPORTED.keys()
    unknown = [key for key in rules if key not in known and not key.startswith("_")]
    on_logits = [
        key for key in _ON_LOGITS if options.get(key) not in (None, 1) and options["beam_size"] == 1
    ]
    notices = {
        "not imported, pass to each call instead (the option)": by_option,
        "not imported, heedful has nothing equal": others,
        "not imported, unknown generation settings": unknown if is_own_file else [],
        "applied to log-probabilities, by transformers (without a beam) to logits": on_logits,
    }
    return [f"{text}: {', '.join(names)}" for text, names in notices.items() if names]


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


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

    eos_ids = role("eos")
    single = [word[0] for word in words if len(word) == 1 and word[0] not in eos_ids]
    single += rules.get("suppress_tokens") or []
    read = {
        "eos_ids": eos_ids,
        "suppressed_ids": sorted(set(_ids("bad_words_ids", single))),
        "forced_eos_id": _ids("forced_eos_token_id", rules.get("forced_eos_token_id")),
    }
    if issubclass(kind, Translator):
        read["decoder_start_ids"] = (
            configured("decoder_start_token_id") or role(_START_ROLES[family])
        )[:1]
        read["forced_bos_id"] = _ids("forced_bos_token_id", rules.get("forced_bos_token_id"))
        if not generation and config.get("force_bos_token_to_be_generated"):  # of transformers 3
            read["forced_bos_id"] = role("bos")
        is_default = not generation and "forced_eos_token_id" not in config
        if is_default and family in _FORCED_EOS:
            read["forced_eos_id"] = read["eos_ids"]
    else:
        read["decoder_start_ids"] = role("bos") if tokenizer is None else list(tokenizer.prefix_ids)
    valid = {key: tuple(id for id in ids if id < vocab_size) for key, ids in read.items()}
    sequences = [_ids("bad_words_ids", word) for word in words if len(word) > 1]
    ids = GenerationIds(
        decoder_start_ids=valid["decoder_start_ids"],
        eos_ids=valid["eos_ids"],
        suppressed_ids=valid["suppressed_ids"],
        forced_bos_id=next(iter(valid.get("forced_bos_id", ())), None),
        forced_eos_id=next(iter(valid["forced_eos_id"]), None),
        suppressed_sequences=tuple(tuple(word) for word in sequences if max(word) < vocab_size),
    )
    notices = []
    if beyond := {id for ids in [*read.values(), *sequences] for id in ids if id >= vocab_size}:
        numbers = ", ".join(map(str, sorted(beyond)))
        notices.append(f"left out: the token {numbers}, beyond the model's {vocab_size:,} ids")
    several = [("forced_eos_token_id", read["forced_eos_id"])]
    several += [("decoder_start_token_id", configured("decoder_start_token_id"))]
    notices += [f"of {key} {ids!r} the first is imported" for key, ids in several if len(ids) > 1]
    if not issubclass(kind, Translator) and rules.get("forced_bos_token_id") is not None:
        notices.append("not imported: forced_bos_token_id, which is for encoder-decoders")
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
            "forced_bos_token_id": _first_id(model),
            "forced_eos_token_id": ids.forced_eos_id,
        }
        most = more.pop("max_new_tokens", None)
        # Of all tokens, the start included; the default is 20.
        more["max_length"] = model.config.max_length if most is None else most + 1
    else:
        more["forced_eos_token_id"] = ids.forced_eos_id
    if ids.suppressed_ids or ids.suppressed_sequences:
        single = [[token] for token in ids.suppressed_ids]
        more["bad_words_ids"] = [*single, *map(list, ids.suppressed_sequences)]
    return content, {k: v for k, v in {**content, **more}.items() if v is not None}


def _first_id(model: Translator) -> int | None:
    """The first id of all outputs: of the model's target language, where each language has one."""
    metadata = model.metadata
    if not metadata.language_codes:
        return model.ids.forced_bos_id
    return None if metadata.tgt_language is None else model.first_id(Options())


def _hf_options(model: Generator) -> dict[str, Any]:
    """The default generation options of a model, by their names in `generation_config.json`."""
    options = model.options()
    settings = {hf_name: getattr(options, name) for name, hf_name in _OPTIONS.items()}
    if options.normalization == "none":
        settings["length_penalty"] = 0.0
    settings["max_new_tokens"] = options.max_new_tokens
    settings["min_new_tokens"] = max((options.min_new_tokens or 0) - 1, 0)  # without EOS
    settings["stop_strings"] = list(options.stop or ())
    early_stopping = {rule: value for value, rule in _STOP_RULES.items()}
    if options.by_beams:
        settings["early_stopping"] = early_stopping[options.stop_rule or "optimal"]
    if options.samples:
        settings["do_sample"] = True
        settings |= {name: getattr(options, name) for name in _SAMPLING}
        settings["top_k"] = options.top_k or 0  # the default of transformers is 50
    defaults: dict[str, Any] = {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0}
    defaults |= {"min_new_tokens": 0, "stop_strings": []}
    return {key: value for key, value in settings.items() if value != defaults.get(key)}


def lost_options(model: Generator) -> list[str]:
    """The default generation options of a model that `generation_config.json` has not."""
    kept = _OPTIONS.keys() | _SAMPLING.keys() | _WRITTEN
    return [
        f"{name} {value!r}"
        for name, value in model.metadata.options.items()
        if name not in kept
        and value not in (None, Options.__dataclass_fields__[name].default, DEFAULTS.get(name))
        and (name, value) != ("normalization", "none")
    ]


def _ids(key: str, value: Any) -> list[int]:
    """The ids of a value, which is an id, a list of ids or None; without negative ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{CONFIG} or {GENERATION_CONFIG}: {key} must be an id, not {value!r}")
    return [token for token in ids if token >= 0]
