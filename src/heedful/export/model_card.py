"""The model card (README.md) of an exported directory: what is known of a model, and its use."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from heedful import __version__
from heedful.data.hf_tokenizers import needs_two_folders
from heedful.data.language_tags import language_of
from heedful.pipelines import (
    AnyModel,
    Classifier,
    Embedder,
    LanguageModel,
    MaskedLanguageModel,
    Translator,
)
from heedful.training.run_report import RecordedRun

CARD = "README.md"
_TO_FILL_IN = "**To be filled in by the author of the model:**"
# Of each kind: the task of the Hub, the Auto class and what the model does.
_KINDS: dict[type[Any], tuple[str | None, str, str]] = {
    Translator: ("translation", "AutoModelForSeq2SeqLM", "an encoder-decoder"),
    LanguageModel: ("text-generation", "AutoModelForCausalLM", "a decoder-only language model"),
    MaskedLanguageModel: ("fill-mask", "AutoModelForMaskedLM", "an encoder with masked tokens"),
    Classifier: ("text-classification", "AutoModelForSequenceClassification", "a classifier"),
    Embedder: ("feature-extraction", "AutoModel", "an encoder"),
}
_LANGUAGE = re.compile(r"[a-z]{2,3}")  # ISO 639, as the Hub checks it
_FACTS = ("training data", "device", "machine", "heedful", "torch", "python")
_HUB_METRICS = {"BLEU": "bleu", "chrF2": "chrf", "chrF2++": "chrf", "TER": "ter"}
_HUB_METRICS |= {"exact match": "exact_match", "accuracy": "accuracy", "F1": "f1"}
_HUB_METRICS |= {"perplexity": "perplexity", "micro_f1": "f1", "macro_f1": "f1"}
_HUB_METRICS |= {"pearson": "pearsonr", "spearman": "spearmanr"}
_HUB_METRICS |= {"mean_squared_error": "mse", "mean_absolute_error": "mae"}


def model_card(model: AnyModel, name: str, model_type: str, run: RecordedRun | None) -> str:
    """The text of a card: metadata for the Hub, use, training, scores, and what is left to fill in.

    Args:
        name: the title.
        model_type: of the exported `config.json`.
        run: the run that trained the model; None: unknown.
    """
    sections = [
        f"---\n{_metadata(model, run)}---",
        f"# {name}",
        _summary(model, model_type),
        f"## Use\n\n{_use(model)}",
        "## Training\n\n" + "\n\n".join(_training(run)),
        "## Scores\n\n" + "\n".join(_scores(run)),
        f"## License\n\n{_TO_FILL_IN} the license of the model, here and in `license` above, and "
        "the licenses of the training data and of a model that the training began with.",
        f"## Intended use and limits\n\n{_TO_FILL_IN} what the model is for, and what not; the "
        "origin of the training data, and the languages and domains that they lack.",
    ]
    return "\n\n".join(sections) + "\n"


def _kind(model: AnyModel) -> tuple[str | None, str, str]:
    [kind] = [entry for kind, entry in _KINDS.items() if isinstance(model, kind)]
    return kind


def _languages(model: AnyModel) -> list[str]:
    """Codes of the languages of source and target, each once."""
    metadata = model.metadata
    codes = [metadata.src_language, metadata.tgt_language]
    codes += [*metadata.language_tags, *metadata.language_codes]
    return list(dict.fromkeys(code for code in codes if code))


def _metadata(model: AnyModel, run: RecordedRun | None) -> str:
    """The block of YAML at the top of a card, by which the Hub finds a model."""
    codes = dict.fromkeys(map(language_of, _languages(model)))  # of `pt_BR` the Hub knows `pt`
    languages = [code for code in codes if _LANGUAGE.fullmatch(code)]
    task = _kind(model)[0]
    if isinstance(model, Translator) and len(_languages(model)) < 2:
        task = None  # of text to text, which is no task of the Hub
    metrics = [_HUB_METRICS[name] for name, _, _ in _score_rows(run) if name in _HUB_METRICS]
    content = {
        "language": languages,
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["heedful", model.metadata.architecture],
        "metrics": list(dict.fromkeys(metrics)),
    }
    known = {key: value for key, value in content.items() if value}
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
    return text.replace("license: unknown\n", "license: unknown # to be filled in by the author\n")


def _summary(model: AnyModel, model_type: str) -> str:
    """A sentence about the model, and its sizes."""
    metadata, config = model.metadata, model.config
    description = _kind(model)[2]
    if metadata.language_codes:
        description += f" for texts in {len(metadata.language_codes)} languages"
    elif isinstance(model, Translator) and metadata.tgt_language:
        sides = f" from {metadata.src_language}" if metadata.src_language else ""
        description += f" for texts{sides} to {metadata.tgt_language}"
    elif _languages(model):
        description += f" for texts in {', '.join(_languages(model))}"
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    rows = [
        f"architecture: `{metadata.architecture}`, exported as `{model_type}`",
        f"parameters: {parameters:,}",
        f"longest text: {config.max_length:,} tokens",
    ]
    for name, tag in metadata.language_tags.items():
        rows.append(f"target language {name}: begin the source with `{tag}`")
    if isinstance(model, Classifier):
        rows.append(f"labels: {', '.join(f'`{label}`' for label in model.labels)}")
    rows = [f"- {row}" for row in rows]
    first = f"{description[0].upper()}{description[1:]}, written by heedful {__version__}."
    return "\n".join([first, "", *rows])


def _use(model: AnyModel) -> str:
    """A block of code that runs the model."""
    auto = _kind(model)[1]
    is_pair = isinstance(model, Translator) and model.has_tokenizer
    is_pair = is_pair and needs_two_folders(model.src_tokenizer, model.tgt_tokenizer)
    decoder = "tokenizer"
    lines = [f"from transformers import {auto}, AutoTokenizer", ""]
    lines.append('path = "."  # this directory, or the name of the model on the Hub')
    if not model.has_tokenizer:
        lines = [f"from transformers import {auto}", "", *lines[2:]]
        lines.append(f"model = {auto}.from_pretrained(path)")
        return _code(lines) + "\n\nThe model has no tokenizer: its input are token ids."
    lines.append("tokenizer = AutoTokenizer.from_pretrained(path)")
    if is_pair:
        decoder = "target_tokenizer"
        lines.append(
            'target_tokenizer = AutoTokenizer.from_pretrained(path, subfolder="tokenizer_target")'
        )
    lines.append(f"model = {auto}.from_pretrained(path)")
    tag = next(iter(model.metadata.language_tags.values()), "")
    lines.append(f"""inputs = tokenizer({json.dumps(tag + "A text.")}, return_tensors="pt")""")
    if isinstance(model, Translator | LanguageModel):
        more = ", max_new_tokens=64" if isinstance(model, LanguageModel) else ""
        if tokens := model.metadata.language_codes:
            source, target = [*tokens.items(), *tokens.items()][:2]
            lines.insert(-1, f"tokenizer.src_lang = {json.dumps(source[0])}")
            lines.append(f"target = tokenizer.convert_tokens_to_ids({json.dumps(target[1])})")
            more += ", forced_bos_token_id=target"
        lines.append(f"outputs = model.generate(**inputs{more})")
        lines.append(f"print({decoder}.decode(outputs[0], skip_special_tokens=True))")
    else:
        lines.append("outputs = model(**inputs)")
    return _code(lines)


def _training(run: RecordedRun | None) -> Iterator[str]:
    """Facts about the data, recipe and machine, from the folder of the run."""
    if run is None:
        yield f"Not recorded in the model's directory. {_TO_FILL_IN} data and settings."
        return
    recipe, facts = run.recipe, run.facts.facts
    yield f"Trained by heedful, task `{recipe.task}`. Facts that the run recorded:"
    rows = [f"- {name}: {facts[name]}" for name in _FACTS if name in facts]
    if run.facts.filters.filters:
        rows.append(f"- filters: {run.facts.filters.summary('rows')}")
    if recipe.init_from:
        rows.append(f"- began with the weights of `{_without_folders(recipe.init_from)}`")
    yield "\n".join(rows) or "- none"
    yield "The recipe, where it differs from the defaults (`heedful train recipe.yaml`):"
    content = yaml.safe_load(run.recipe.to_yaml(differences=True))
    text = yaml.safe_dump(_without_folders(content), sort_keys=False, allow_unicode=True)
    yield _code([text.rstrip()], "yaml")


def _without_folders(value: Any) -> Any:
    """The content of a recipe with the name alone of each path that only its machine has."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    is_path = isinstance(value, str) and (value.startswith("~") or Path(value).is_absolute())
    return Path(value).name if is_path else value


def _score_rows(run: RecordedRun | None) -> Iterator[tuple[str, float, str]]:
    """Name, value and signature of each final score of a run; without a signature ""."""
    for name, entry in run.facts.scores.items() if run is not None else ():
        score = entry if isinstance(entry, Mapping) else {"score": entry}
        yield score.get("name", name), score["score"], score.get("signature", "")


def _scores(run: RecordedRun | None) -> Iterator[str]:
    rows = list(_score_rows(run))
    if run is None or not rows:
        yield f"None is recorded. {_TO_FILL_IN} the data, the command and the result."
        return
    data = run.recipe.data
    corpora = data.corpora.values()
    if data.test.paths() or any(corpus.test.paths() for corpus in corpora):
        split = "the test data"
    elif data.train.paths() or corpora:
        split = "the held-out data"
    else:  # of a task that makes its data
        split = "the test data (without any, the held-out data)"
    yield f"Of the final model on {split} of the run, with the settings of its recipe:"
    yield ""
    for name, value, signature in rows:
        yield f"- {name}: {value:.4g}" + (f" (`{signature}`)" if signature else "")


def _code(lines: Sequence[str], language: str = "python") -> str:
    """A block of code; its fence is longer than any in the text."""
    text = "\n".join(lines)
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
