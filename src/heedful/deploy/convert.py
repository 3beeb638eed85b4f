"""Converts a saved model for a backend."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from heedful import extras
from heedful.backends.base import Settings
from heedful.backends.ctranslate2.conversion import embeddings_of, longest_prompt, write
from heedful.backends.ctranslate2.runtime import HEAD, CTranslate2, CTranslate2Facts
from heedful.backends.ctranslate2.vocabulary import Vocabulary, names_of
from heedful.backends.manifest import PACKAGES, Manifest, conversion_path
from heedful.backends.registry import open_conversion, version_mismatch
from heedful.errors import UserError
from heedful.files import write_directory
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator


def convert_model(
    model: SavedModel,
    directory: Path,
    precision: str,
    backend: str = CTranslate2.name,
) -> dict[str, Any]:
    """Write a conversion of a model into `conversion_path` atomically; returns the net's facts.

    Raises UserError as `heedful.backends.aot.compile.compile_net`, or as `write_ctranslate2`, and
    for another backend.
    """
    if backend not in PACKAGES:
        raise UserError(f"models are converted for {', '.join(PACKAGES)}, not for {backend}")
    facts: list[dict[str, Any]] = []

    def fill(folder: Path) -> None:
        if backend == CTranslate2.name:
            facts.append(asdict(write_ctranslate2(model, folder, precision)))
            return
        from heedful.backends.aot.compile import compile_net

        longest = model.config.max_length
        facts.append(asdict(compile_net(model.net, longest, folder, precision)))

    write_directory(conversion_path(directory, backend, precision), fill)
    return facts[0]


def write_ctranslate2(
    model: SavedModel, directory: Path, precision: str, *, adds_end: bool = False
) -> CTranslate2Facts:
    """Write a model in the format of CTranslate2 into an existing directory; returns its facts.

    Args:
        adds_end: CTranslate2 appends EOS to each source.

    Raises:
        UserError: ctranslate2 is not installed, or cannot run the net, with every reason.
    """
    extras.require("fast", "the format of CTranslate2")
    net, start, end, unknown = model.net, None, None, None
    sides = (model.src_tokenizer, model.tgt_tokenizer) if model.has_tokenizer else (None, None)
    names = [
        names_of(tokenizer, embedding.tokens.num_embeddings)
        for tokenizer, embedding in zip(sides, embeddings_of(net), strict=False)
    ]
    if isinstance(model, Generator):
        start, end = next(iter(model.ids.decoder_start_ids), None), model.end_ids()[0]
    if model.has_tokenizer and model.tgt_tokenizer.unk_id >= 0:
        unknown = model.tgt_tokenizer.unk_id
    vocabulary = Vocabulary(names[0], names[-1], start, end, unknown, adds_end)
    write(net, directory, vocabulary, precision)
    if isinstance(model, Classifier):
        parts = (net.head.labels.weight, net.head.labels.bias)
        weight, bias = (part.detach().float().cpu().numpy() for part in parts)
        np.savez(directory / HEAD, weight=weight, bias=bias)
    if isinstance(model, Translator):
        return CTranslate2Facts(family="encoder_decoder")
    if isinstance(model, LanguageModel):
        return CTranslate2Facts(family="decoder_only", longest_prompt=longest_prompt(net))
    types = net.embedding.types
    num_types = 0 if types is None else types.num_embeddings
    return CTranslate2Facts(family="encoder_only", num_types=num_types)


def reusable_conversion(directory: Path, backend: str, precision: str) -> dict[str, Any] | None:
    """Facts of an existing conversion that can be used here; None: the model has none.

    So that a compilation of minutes is not repeated for the same weights.
    """
    try:
        manifest = Manifest.read(directory)
        if manifest is None or manifest.mismatch_reason(directory):
            return None
        known = manifest.backends.get(backend)
        if known is None or precision not in known.proofs:
            return None
        if version_mismatch(backend, known.version):
            return None
        open_conversion(directory, directory, backend, precision, known.facts, Settings(1))
    except UserError:  # damaged
        return None
    return known.facts
