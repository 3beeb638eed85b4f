"""The corpora of a run: their files by split, tags before sources, weights by epoch."""

from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from heedful.config import Corpus, Files, Recipe
from heedful.data.columns import CorpusRange
from heedful.data.draws import CorpusShare
from heedful.data.language_tags import matching_tag
from heedful.data.row_files import expand_path
from heedful.data.special_tokens import language_tokens, tag_id
from heedful.data.tokenizer import Tokenizer
from heedful.data.tokenizer_training import SPECIAL_NAME
from heedful.errors import UserError, format_names
from heedful.plugins import SHIPPED
from heedful.recipe_files import RECIPES

SPLITS = ("train", "valid", "test")
SOURCES = ("src", "tgt", "text", "file")  # keys of a split that name its files


class SplitFiles(NamedTuple):
    """The files of one split, or of one corpus of it.

    Attributes:
        key: the recipe key that names them, such as `data.valid` or `data.corpora.de.valid`.
        corpus: the name of the corpus; "" without `data.corpora`.
        files: relative paths are in `data.folder`.
    """

    key: str
    split: str
    corpus: str
    files: Files


def split_files(recipe: Recipe) -> list[SplitFiles]:
    """The files of train, valid and test that a recipe names, by split and then by corpus."""
    data = recipe.data
    if not data.corpora:
        named = [SplitFiles(f"data.{name}", name, "", getattr(data, name)) for name in SPLITS]
    else:
        named = [
            SplitFiles(
                f"data.corpora.{name}{'' if split == 'train' else '.' + split}",
                split,
                name,
                corpus if split == "train" else getattr(corpus, split),
            )
            for split in SPLITS
            for name, corpus in data.corpora.items()
        ]
    folder = Path(data.folder or "")
    resolved = []
    for entry in named:
        found: dict[str, list[str]] = {}
        for key in SOURCES:
            if paths := resolve_paths(getattr(entry.files, key), folder):
                found[key] = [str(file) for path in paths for file in expand_path(path)]
        if found:
            resolved.append(entry._replace(files=entry.files.model_copy(update=found)))
    return resolved


def resolve_paths(paths: str | list[str] | None, folder: Path = Path()) -> list[Path]:
    """The paths that a recipe names; `shipped:NAME` is a file that comes with heedful."""
    names = [paths] if isinstance(paths, str) else paths or []
    return [
        RECIPES / name.removeprefix(SHIPPED) if name.startswith(SHIPPED) else folder / name
        for name in names
    ]


def is_paired(recipe: Recipe) -> bool:
    """True if the training rows of a classifier have a second text."""
    data = recipe.data
    return any(part.pair_field is not None for part in (data.train, *data.corpora.values()))


def languages_of(recipe: Recipe, corpus: str) -> tuple[str | None, str | None]:
    """The languages of the sources (or texts) and of the targets of a corpus."""
    data = recipe.data
    if not corpus:
        return data.src_language, data.tgt_language
    section = data.corpora[corpus]
    return section.src_language or data.src_language, section.tgt_language or data.tgt_language


def shared_languages(recipe: Recipe) -> tuple[str | None, str | None]:
    """The languages of sources and of targets; None where corpora differ or none is given."""
    pairs = [languages_of(recipe, name) for name in recipe.data.corpora or [""]]
    src, tgt = ({pair[side] for pair in pairs} for side in (0, 1))
    return (src.pop() if len(src) == 1 else None), (tgt.pop() if len(tgt) == 1 else None)


def tags_of(corpus: Corpus) -> tuple[str, ...]:
    """The tags before the sources of a corpus: the target's language first."""
    return tuple(tag for tag in (corpus.tgt_tag, corpus.src_tag) if tag is not None)


def all_tags(recipe: Recipe) -> tuple[str, ...]:
    """The tags of all corpora, each once."""
    tags = (tag for corpus in recipe.data.corpora.values() for tag in tags_of(corpus))
    return tuple(dict.fromkeys(tags))


def language_tags(recipe: Recipe) -> dict[str, str]:
    """The tag of each target language that has one.

    Raises:
        UserError: a language with two tags, or with and without one; a tag without a language.
    """
    by_language: dict[str | None, dict[str | None, str]] = {}
    for name, corpus in recipe.data.corpora.items():
        language = languages_of(recipe, name)[1]
        if corpus.tgt_tag is not None and language is None:
            raise UserError(
                f"data.corpora.{name}.tgt_tag {corpus.tgt_tag} names a language that is not given; "
                f"set data.corpora.{name}.tgt_language"
            )
        by_language.setdefault(language, {}).setdefault(corpus.tgt_tag, name)
    for language, tags in by_language.items():
        if len(tags) > 1:
            listed = " and ".join(
                f"{tag or 'no tag'} (corpus {name})" for tag, name in tags.items()
            )
            raise UserError(
                f"data.corpora: the target language {language} has {listed} as tgt_tag; give it "
                "one, and mark sources of another kind by src_tag"
            )
    untagged = [name for tags in by_language.values() for tag, name in tags.items() if tag is None]
    if untagged and len(by_language) > 1 and len(untagged) < len(by_language):
        raise UserError(
            f"data.corpora.{untagged[0]} has no tgt_tag, but corpora of other target languages "
            "have; give all of them one"
        )
    table = {language: next(iter(tags)) for language, tags in by_language.items()}
    return {code: tag for code, tag in table.items() if code is not None and tag is not None}


def check_corpora(recipe: Recipe) -> None:
    """Raise UserError for wrong tags, and for corpora whose rows are replaced."""
    language_tags(recipe)
    is_new = recipe.tokenizer.path is recipe.init_from is recipe.distillation.teacher is None
    for tag in all_tags(recipe):
        if is_new and not SPECIAL_NAME.fullmatch(tag):
            raise UserError(
                f"data.corpora: a tag in a new tokenizer has a name in angle brackets, as <2de>, "
                f"not {tag!r}"
            )
    if recipe.data.corpora and recipe.distillation.level == "sequence":
        raise UserError(
            "distillation.level sequence replaces the rows of data.train, so data.corpora has no "
            "effect; give one corpus, or use level word"
        )


class IdsBefore(NamedTuple):
    """The ids before the sources and the targets of each corpus ("" without `data.corpora`).

    Sources have the tags of their corpus. With a tokenizer that has tokens of languages, and
    without tags, each text has that of its language: only then `tgt` has entries.
    """

    src: dict[str, tuple[int, ...]]
    tgt: dict[str, tuple[int, ...]]


def ids_before(recipe: Recipe, tokenizer: Tokenizer) -> IdsBefore:
    """The ids before texts. A new model whose recipe names no languages has none of languages.

    Raises:
        UserError: a tag that is not one token of the tokenizer; a language that the tokenizer has
            no token of; no languages, for a run that starts from a model which puts their tokens
            before texts.
    """
    before = IdsBefore({}, {})
    if all_tags(recipe):
        for name, corpus in recipe.data.corpora.items():
            if tags := tags_of(corpus):
                before.src[name] = tuple(tag_id(tokenizer, tag) for tag in tags)
        return before
    tokens = language_tokens(tokenizer)
    for name in recipe.data.corpora or [""] if tokens else ():
        key = f"data.corpora.{name}." if name else "data."
        for side, language in zip(before._fields, languages_of(recipe, name), strict=True):
            if language is None:
                if recipe.init_from is recipe.distillation.teacher is None:
                    return IdsBefore({}, {})
                raise UserError(
                    f"{key}{side}_language is not given: the model that the run starts from puts "
                    "the token of its language before each text, so set it"
                )
            if (match := matching_tag(language, tokens)) is None:
                raise UserError(
                    f"{key}{side}_language: the tokenizer has no token of the language {language}; "
                    f"it has {format_names([*tokens], str)}"
                )
            getattr(before, side)[name] = (tag_id(tokenizer, tokens[match]),)
    return before


def corpus_shares(recipe: Recipe, ranges: Sequence[CorpusRange]) -> list[CorpusShare]:
    """The passes over each corpus by epoch: its weights, times the factor of the temperature.

    With a temperature T, n_c rows of corpus c and N of all, the factor is
    N · n_c^(1/T - 1) / Σ_k n_k^(1/T): the shares are in proportion to n_c^(1/T), and the rows of an
    epoch are N in all (Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation
    in the Wild", section 4.2).
    """
    temperature = recipe.data.temperature
    sizes = [entry.size for entry in ranges]
    shares = []
    for entry in ranges:
        factor = Fraction(1)
        if temperature is not None:
            total = sum(size ** (1 / temperature) for size in sizes)
            passes = sum(sizes) * entry.size ** (1 / temperature) / (total * entry.size)
            factor = Fraction(f"{passes:.6f}")  # rounded, so that no last bit of a power decides
        corpus = recipe.data.corpora[entry.name]
        steps = [(epoch, factor * Fraction(str(weight))) for epoch, weight in corpus.weights()]
        shares.append(CorpusShare(entry, steps))
    return shares


def check_ranges(recipe: Recipe, names: Collection[str]) -> None:
    """Raise UserError for a corpus of which no row is left; `names`: those with rows."""
    if missing := [name for name in recipe.data.corpora if name not in names]:
        raise UserError(
            f"data.corpora: no row of {format_names(missing, str)} is left to train on; give other "
            "files, or leave it out"
        )
