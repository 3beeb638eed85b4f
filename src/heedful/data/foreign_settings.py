"""What a Hugging Face directory says of its tokenizer beside the vocabulary: specials and template.

It may say it in several places: `tokenizer_config.json`, `special_tokens_map.json` and
`added_tokens.json`, then what the model's own tokenizer class takes for granted, and last the ids
of `config.json`. That is settled here once.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from heedful.data.tokenizer import Specials, Template
from heedful.errors import UserError
from heedful.files import read_json

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

# What each family's own tokenizer class calls its specials.
_NAMES: dict[str, dict[str, str]] = {
    "bert": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "roberta": {
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
        "sep": "</s>",
        "pad": "<pad>",
        "cls": "<s>",
        "mask": "<mask>",
    },
    "gpt2": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "gpt1": {"unk": "<unk>"},
    "t5": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
    "llama": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "marian": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
}
_NAMES["xlm-roberta"] = _NAMES["roberta"]
# Classes of tokenizers and types of models, by family; in lower case without "-" and "_".
_FAMILIES = {
    **dict.fromkeys(("bert", "distilbert", "electra", "mobilebert"), "bert"),
    **dict.fromkeys(("roberta", "bart", "longformer", "led"), "roberta"),
    **dict.fromkeys(("gpt2", "gptneo", "gptj"), "gpt2"),
    **dict.fromkeys(("llama", "mistral"), "llama"),
    **dict.fromkeys(("t5", "mt5"), "t5"),
    "openaigpt": "gpt1",
    "marian": "marian",
    "xlmroberta": "xlm-roberta",
}
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class Settings:
    """What the files say, and what their family takes for granted.

    `names` gives a role's special, or `None` where it is said that there is none; `stated` are the
    roles that a file names: those exist even if the vocabulary lacks them. `added` are the tokens
    beside the vocabulary, by id; `extra` are further specials. `named` is the tokenizer class or
    the type of model that the files name, `family` the one of ours that it belongs to.
    """

    directory: Path
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    named: str | None
    family: str | None
    names: Mapping[str, AddedToken | None]
    stated: frozenset[str]
    extra: Sequence[AddedToken]
    added: Mapping[int, AddedToken]

    def name(self, role: str) -> str:
        """The special of a role. Raises UserError where there is none."""
        token = self.names.get(role)
        if token is None:
            raise UserError(f"{self.directory} names no {role}_token, which its tokenizer needs")
        return str(token.content)

    def of(self, families: Sequence[str], path: Path, *, otherwise: str | None) -> "Settings":
        """These, once it is sure that the rules for reading `path` are known.

        A vocabulary alone does not say how text is cut, so a class that is not known is refused.

        Args:
            otherwise: the family where the files name no class; `None` to refuse that too.
        """
        if self.family in families:
            return self
        if self.named is None and otherwise is not None:
            names = {role: _special(name) for role, name in _NAMES.get(otherwise, {}).items()}
            return replace(self, family=otherwise, names={**names, **self.names})
        raise UserError(
            f"{path} is for a tokenizer of class {self.named or '(none named)'}, whose rules are"
            " not known here; load it with transformers' AutoTokenizer and save_pretrained it,"
            " which writes a tokenizer.json that can be read"
        )


def read_settings(directory: Path) -> Settings:
    """Raises UserError where a file is damaged."""

    def read(name: str) -> dict[str, Any]:
        path = directory / name
        content = read_json(path) if path.is_file() else {}
        if not isinstance(content, dict):
            raise UserError(f"{path} is damaged: it holds no names and values")
        return content

    config, model = read("tokenizer_config.json"), read("config.json")
    said = dict(config)
    if "added_tokens_decoder" not in config:  # which makes the older files out of date
        said |= read("special_tokens_map.json")
    family, named = _family(config, model)
    try:
        names = {role: _special(name) for role, name in _NAMES.get(family or "", {}).items()}
        stated = {role: said[f"{role}_token"] for role in ROLES if f"{role}_token" in said}
        names |= {role: _special(name) for role, name in stated.items()}
        listed = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
        extra = [t for t in map(_special, listed) if t is not None and isinstance(listed, list)]
        if "added_tokens_decoder" in config:
            added = {int(i): _added(t) for i, t in config["added_tokens_decoder"].items()}
        else:
            special = {str(t.content) for t in [*names.values(), *extra] if t is not None}
            added = {
                int(i): AddedToken(name, special=name in special, normalized=name not in special)
                for name, i in read("added_tokens.json").items()
            }
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"the tokenizer's settings in {directory} are damaged: {error}") from None
    return Settings(directory, config, model, named, family, names, frozenset(stated), extra, added)


def register(backend: Backend, settings: Settings) -> None:
    """Make the backend find in text every token that the settings name beside the vocabulary.

    Raises UserError where a token does not get the id that is said.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for i, token in sorted(settings.added.items()):
        if token.content in known:
            continue
        backend.add_tokens([token])
        known.add(token.content)
        if backend.token_to_id(token.content) != i:
            raise UserError(
                f"{settings.directory} gives the token {token.content!r} the id {i}, but its"
                f" vocabulary leads to {backend.token_to_id(token.content)}; a file is missing"
            )
    for role in ROLES:
        named = settings.names.get(role)
        if named is None or named.content in known:
            continue
        # What only the family takes for granted may be lacking: the model has no id for it.
        if role in settings.stated or backend.token_to_id(named.content) is not None:
            backend.add_special_tokens([named])
            known.add(named.content)
    backend.add_special_tokens([token for token in settings.extra if token.content not in known])


def specials_of(settings: Settings, id_of: Callable[[str], int | None]) -> Specials:
    """The specials by their roles; `id_of` gives the id of a piece."""
    ids = {
        role: None if token is None else id_of(token.content)
        for role, token in settings.names.items()
    }
    unk = ids.get("unk")
    if unk is not None and unk in (ids.get("bos"), ids.get("eos")):
        unk = None  # GPT-2's one special is a mark; its bytes leave nothing unknown
    return Specials(
        pad_id=ids.get("pad"),
        bos_id=ids.get("bos"),
        eos_id=ids.get("eos"),
        unk_id=unk,
        mask_id=ids.get("mask"),
        sentinel_ids=tuple(_numbered("<extra_id_{}>", id_of))
        or tuple(_numbered("<extra_{}>", id_of)),
        cls_id=ids.get("cls"),
        sep_id=ids.get("sep"),
    )


def names_from_ids(settings: Settings, backend: Backend, ids: Mapping[str, int]) -> Settings:
    """The settings with names for roles that they lack: by ids, and what the model itself says."""
    model = json.loads(backend.to_str())["model"]
    unk_id = model.get("unk_id")
    unk = model.get("unk_token") if unk_id is None else backend.id_to_token(unk_id)
    names = {"unk": unk, **{role: backend.id_to_token(i) for role, i in ids.items()}}
    found = {role: _special(name) for role, name in names.items() if name is not None}
    return replace(settings, names={**found, **settings.names})


def config_ids(settings: Settings) -> dict[str, int]:
    """The ids that `config.json` gives the roles; of several ends (LLaMA 3's) the first."""
    found = {}
    for role in ROLES:
        value = settings.model.get(f"{role}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and first >= 0:
            found[role] = first
    return found


def ids_of(specials: Specials) -> frozenset[int]:
    """The ids of all roles."""
    roles = (
        specials.pad_id,
        specials.bos_id,
        specials.eos_id,
        specials.unk_id,
        specials.mask_id,
        specials.cls_id,
        specials.sep_id,
    )
    return frozenset(i for i in (*roles, *specials.sentinel_ids) if i is not None)


def set_template(backend: Backend, settings: Settings) -> None:
    """What the family puts around a text, where no `tokenizer.json` says it."""
    config, family = settings.config, settings.family
    if family == "bert":
        cls, sep = settings.name("cls"), settings.name("sep")
        _set(backend, [cls, "$A:0", sep], [cls, "$A:0", sep, "$B:1", f"{sep}:1"], {cls, sep})
    elif family in ("roberta", "xlm-roberta"):
        cls, sep = settings.name("cls"), settings.name("sep")
        _set(backend, [cls, "$A", sep], [cls, "$A", sep, sep, "$B", sep], {cls, sep})
    elif family == "t5":
        eos = settings.name("eos")
        _set(backend, ["$A", eos], ["$A", eos, "$B", eos], {eos})
    else:
        bos = config.get("add_bos_token", family == "llama")  # as LLaMA was trained
        eos = config.get("add_eos_token", False)
        before = [settings.name("bos")] if bos else []
        after = [settings.name("eos")] if eos else []
        single = [*before, "$A", *after]
        _set(backend, single, [*single, *before, "$B", *after], {*before, *after})


def set_own_template(backend: Backend, template: Template) -> None:
    """Make the backend's `encode` with specials do what `Tokenizer.wrap` does."""
    before = [str(backend.id_to_token(i)) for i in template.prefix_ids]
    middle = [str(backend.id_to_token(i)) for i in template.pair_middle_ids or ()]
    after = [str(backend.id_to_token(i)) for i in template.suffix_ids]
    pair = [*before, "$A", *middle, "$B", *after]
    _set(backend, [*before, "$A", *after], pair, {*before, *middle, *after})


def template_of(backend: Backend) -> Template:
    """What the backend puts around any text, found by letting it do so."""
    probe = Backend(models.WordLevel({"a": 0}, unk_token="a"))

    def parts(is_pair: bool) -> list[tuple[int, ...]]:
        done = backend.post_process(
            probe.encode("a"), probe.encode("a") if is_pair else None, add_special_tokens=True
        )
        found: list[tuple[int, ...]] = [()]
        for i, sequence in zip(done.ids, done.sequence_ids, strict=True):
            found = [*found, ()] if sequence is not None else [*found[:-1], (*found[-1], i)]
        return found

    prefix, suffix = parts(False)
    pair_prefix, middle, pair_suffix = parts(True)
    fits = (pair_prefix, pair_suffix) == (prefix, suffix)
    return Template(prefix, suffix, middle if fits else None)


def _family(config: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[str | None, str | None]:
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if named is None or named in _GENERIC:
        named = model.get("model_type")
    plain = str(named).lower().replace("-", "").replace("_", "")
    return _FAMILIES.get(plain.removesuffix("fast").removesuffix("tokenizer")), named


def _special(name: Any) -> AddedToken | None:
    if name is None:
        return None
    if isinstance(name, dict):
        return _added({**name, "special": True})
    return AddedToken(str(name), special=True, normalized=False)


def _added(token: Mapping[str, Any]) -> AddedToken:
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})


def _numbered(pattern: str, id_of: Callable[[str], int | None]) -> Iterator[int]:
    for number in count():
        i = id_of(pattern.format(number))
        if i is None:
            return
        yield i


def _set(backend: Backend, single: list[str], pair: list[str], names: set[str]) -> None:
    ids = {name: backend.token_to_id(name) for name in sorted(names)}
    for name, i in ids.items():
        if i is None:
            raise UserError(f"the vocabulary lacks {name}, which its model expects around a text")
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(ids.items())
    )
