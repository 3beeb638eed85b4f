"""Vectors of texts: their prompt and the pooling of states, also as sentence-transformers stores
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from heedful.errors import UserError, describe
from heedful.files import plain_name, read_json, read_object

Pooling = Literal["mean", "first", "last", "max"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
# Pooling -> its name in sentence-transformers, and its key in the spelling that all versions read.
ST_NAMES: dict[Pooling, str] = {"mean": "mean", "first": "cls", "last": "lasttoken", "max": "max"}
ST_KEYS: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens",
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
}


def check_pooling(pooling: str, normalize: object = None) -> None:
    """Raise UserError for an unknown pooling, and for a `normalize` that is no bool or None."""
    if not isinstance(normalize, bool | None):
        raise UserError(f"normalize must be True or False, not {describe(normalize)}")
    if pooling not in POOLINGS:
        raise UserError(f"pooling must be {', '.join(POOLINGS)}, not {pooling!r}")


def pool(states: NDArray[np.float32], pooling: Pooling, *, normalize: bool) -> NDArray[np.float32]:
    """The vector (D) of a text by the states (T, D) of its tokens: their mean or maximum, or one.

    Args:
        normalize: divide it by its length, or by 1e-12 where that is smaller.
    """
    if pooling == "mean":
        vector = states.mean(0, dtype=np.float32)
    elif pooling == "max":
        vector = states.max(0)
    else:
        vector = states[0 if pooling == "first" else -1]
    if normalize:
        vector = vector.astype(np.float32)
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector


def find_prompt(
    prompts: Mapping[str, str], default: str | None, prompt: str | None, name: str | None
) -> str:
    """The text before each text: `prompt`, else the one of that name, else the default; or none.

    Raises:
        UserError: both are given; no text; an unknown name.
    """
    if prompt is not None and name is not None:
        raise UserError("give a prompt or the name of one, not both")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise UserError(f"prompt must be a text, not {describe(prompt)}")
        return prompt
    name = default if name is None else name
    if name is None:
        return ""
    if name not in [*prompts]:
        known = ", ".join(prompts) or "none"
        raise UserError(f"the model has no prompt of the name {name!r}; it has: {known}")
    return prompts[name]


class StoredPooling(NamedTuple):
    """The pooling and prompts of a directory of sentence-transformers.

    Attributes:
        default_prompt: name of one; None: no prompt.
        notices: of what is not imported.
    """

    pooling: Pooling
    normalize: bool
    prompts: dict[str, str]
    default_prompt: str | None
    notices: list[str]


def read_pooling(directory: Path, longest: int) -> StoredPooling | None:
    """The pooling that `modules.json` names; None for a directory without that file.

    Args:
        longest: the most tokens of the net.

    Raises:
        UserError: modules or a pooling that heedful does not have; damaged prompts.
    """
    file = directory / MODULES
    if not file.is_file():
        return None
    modules = read_json(file)
    try:
        kinds = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in modules]
    except (KeyError, TypeError):
        raise UserError(f"{file} is not a list of modules with type and path") from None
    names = [name for name, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{file} has the modules {', '.join(names)}; supported: Transformer, Pooling, and "
            "Normalize after them. Without the file the net alone is read"
        )
    configs = [directory / plain_name(path, file) / "config.json" for _, path in kinds[1:]]
    if len(configs) == 2 and configs[1].is_file():
        _check_normalize(configs[1])
    name, prompts = _stored_name(configs[0]), _stored_prompts(directory / PROMPTS)
    return StoredPooling(name, len(configs) == 2, *prompts, _notices(directory, longest))


def _stored_prompts(file: Path) -> tuple[dict[str, str], str | None]:
    """The prompts of a file by name, and the name of the default; none if it is missing."""
    content = read_object(file) if file.is_file() else {}
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        text is None or isinstance(text, str) for text in prompts.values()
    ):
        raise UserError(f"{file}: prompts must be texts by name, not {prompts!r}")
    if default is not None and default not in [*prompts]:
        raise UserError(f"{file}: default_prompt_name is {default!r}, which prompts does not have")
    return {name: text or "" for name, text in prompts.items()}, default


def _stored_name(file: Path) -> Pooling:
    """The pooling in the `config.json` of the module, in its present or former spelling."""
    content = read_object(file)
    if not content.get("include_prompt", True):
        raise UserError(f"{file}: include_prompt is false; supported: true")
    flags = [key for key in content if key.startswith("pooling_mode_") and content[key]]
    modes = content.get("pooling_mode", flags or "mean")
    modes = modes if isinstance(modes, list) else [modes]
    for name, st_name in ST_NAMES.items():
        if modes in ([st_name], [ST_KEYS[name]]):
            return name
    supported = ", ".join(ST_NAMES.values())
    raise UserError(
        f"{file}: the pooling {' and '.join(map(str, modes))} is not supported; supported: one of "
        f"{supported}"
    )


def _check_normalize(file: Path) -> None:
    """Raise UserError for a module that normalizes something else than the vector of a text."""
    content = read_object(file)
    for key in ("module_input_name", "module_output_name"):
        if content.get(key, "sentence_embedding") not in ("sentence_embedding", None):
            raise UserError(f"{file}: {key} is {content[key]!r}; supported: sentence_embedding")


def _notices(directory: Path, longest: int) -> list[str]:
    """Notices of settings of the texts that are not imported."""
    settings: dict[str, Any] = {}
    if (directory / SETTINGS).is_file():
        settings = read_object(directory / SETTINGS)
    notices = []
    file = directory / "tokenizer_config.json"  # which has the limit in newer versions
    tokenizer = read_object(file) if file.is_file() else {}
    limits = settings.get("max_seq_length"), tokenizer.get("model_max_length")
    length = min((limit for limit in limits if isinstance(limit, int)), default=longest)
    if length < longest:
        notices.append(
            f"{directory}: sentence-transformers cuts texts after {length} tokens; heedful reads "
            f"up to {longest}"
        )
    if settings.get("do_lower_case"):
        notices.append(f"{directory}: texts are to be given in lower case (do_lower_case)")
    return notices
