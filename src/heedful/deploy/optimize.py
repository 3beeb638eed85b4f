"""Finds the fastest backend of a model on this machine, and records it in `backends.json`."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

from heedful.backends.aot import ENCODER_PRECISIONS, GENERATOR_PRECISIONS
from heedful.backends.base import Backend, Settings
from heedful.backends.ctranslate2.conversion import PRECISIONS as CT2_PRECISIONS
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.ctranslate2.vocabulary import write_vocabulary_map
from heedful.backends.manifest import (
    FOLDER,
    MANIFEST,
    SHORTLIST,
    BackendChoice,
    Kind,
    Manifest,
    Use,
    conversion_path,
    sha256_of,
)
from heedful.backends.registry import open_conversion
from heedful.backends.shortlist import Pairs, Shortlist, make_shortlist
from heedful.backends.torch.eager import Eager
from heedful.data.rows import is_blank
from heedful.deploy.convert import convert_model, reusable_conversion
from heedful.deploy.measure import Conversion, candidates, measure
from heedful.deploy.prove import Proof, Prover
from heedful.deploy.rounds import Outcome
from heedful.errors import UserError
from heedful.files import read_object, write_directory, write_json
from heedful.hardware import cores
from heedful.pipelines.base import CONFIG, SavedModel
from heedful.pipelines.loading import check_own_format, tokenizer_files
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.progress import track

# Of conversions of some net, by backend; `_precisions` has those of a model.
PRECISIONS_OF: dict[str, Sequence[str]] = {
    "eager": (),
    CTranslate2.name: CT2_PRECISIONS,
    "compiled": ENCODER_PRECISIONS,
}
BACKENDS = tuple(PRECISIONS_OF)
PRECISIONS = tuple(dict.fromkeys(chain.from_iterable(PRECISIONS_OF.values())))
USES: tuple[Use, ...] = get_args(Use)
_BUSY = 0.1  # share of the cores that other programs use, above which the choice depends on them


@dataclass
class Findings:
    """The result of `optimize`.

    Attributes:
        manifest: of the kept conversions.
        proofs: of each kept conversion, by backend and precision.
        refused: the reason why a conversion is not kept, by backend and precision.
        outcomes: for each use the tokens per second of its settings, the fastest first.
        shortlist: a report of the kept shortlist; None: not requested, or refused.
        cores_of_others: that other programs used during the measurement; 0 where it is unknown.
    """

    manifest: Manifest
    proofs: dict[str, Proof] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    outcomes: dict[Use, Outcome[BackendChoice]] = field(default_factory=dict)
    shortlist: "ShortlistReport | None" = None
    cores_of_others: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Other programs used so much of the machine that without them another choice may be the
        fastest."""
        return self.cores_of_others > _BUSY * cores()

    @property
    def undecided(self) -> list[Use]:
        """The uses whose choice may not be the fastest when nothing else runs."""
        return [use for use, found in self.outcomes.items() if self.is_busy or found.rival]


@dataclass(frozen=True)
class ShortlistReport:
    """A shortlist on held-out text.

    Attributes:
        size: mean number of target tokens allowed for a sentence.
        recall: share of the references' tokens that are allowed for their sentences.
        proof: the net with the shortlist against the net without.
    """

    size: float
    recall: float
    proof: Proof


def optimize(
    model: SavedModel,
    directory: Path,
    texts: Sequence[str],
    answers: Sequence[str] | None = None,
    *,
    backends: Sequence[str] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    uses: Sequence[Use] = USES,
    tolerance: float | None = None,
    threads: Sequence[int] = (),
    pairs: Pairs | None = None,
) -> Findings:
    """Convert a model for backends, prove and measure them, and write `directory/backends`.

    Args:
        model: opened eager, from `directory`.
        texts, answers: held-out text, as in `Prover`.
        tolerance: allowed loss of conversions that are not float32; None: `prove.TOLERANCES`.
        backends: to try; None: `BACKENDS`.
        threads: counts to measure, of each worker; empty: one, and all cores.
        pairs: ids of a translator's training pairs, from which a shortlist is made; the shortlist
            is kept where it loses no more than `tolerance`. None: no shortlist.

    Raises:
        UserError: unknown names; more threads than cores; no held-out text; no backend that runs
            the model, with every reason.
    """
    backends = BACKENDS if backends is None else backends
    check_names(backends, precisions, threads, uses)
    check_own_format(directory)
    nonblank = [text for text in texts if not is_blank(text)]
    if not nonblank:
        raise UserError("the validation text is empty; give it at least one line")
    if "base" in read_object(directory / CONFIG):
        raise UserError(
            f"{directory} holds only what was added to another model, and a backend needs all "
            f"weights; make a whole model first: heedful merge {directory} OUT"
        )
    findings = Findings(Manifest.new(directory, cast(Kind, type(model).__name__)))

    def fill(folder: Path) -> None:
        """Write the conversions and the manifest of a directory of backends."""
        converter = _Converter(model, directory, folder / "work", tolerance, findings)
        model.shortlist = None
        prover = None
        conversions = [(b, p) for b in backends for p in precisions if p in _precisions(b, model)]
        if conversions or pairs is not None:
            prover = Prover(model, texts, answers)
        with track("building and proving", len(conversions)) as advance:
            for conversion in conversions:
                assert prover is not None
                converter.build(conversion, prover)
                advance(1)
        if prover is not None and pairs is not None:
            with track("counting a shortlist", 1) as advance:
                shortlist = converter.shortlist(pairs, prover)
                advance(1)
            if shortlist is not None:
                shortlist.save(folder / SHORTLIST, sha256_of(tokenizer_files(directory)))
        settings = candidates(model, converter.conversions, nonblank, backends, threads, uses)
        if not settings:
            reasons = "; ".join(dict.fromkeys(findings.refused.values()))
            raise UserError(f"no requested backend runs this model: {reasons}")
        measured = measure(model, nonblank, settings, converter.open_choice)
        findings.outcomes, findings.cores_of_others = measured
        best = {use: outcome.fastest for use, outcome in findings.outcomes.items()}
        for backend in {backend for backend, _ in converter.conversions}:
            (converter.work / FOLDER / backend).rename(folder / backend)
        shutil.rmtree(converter.work, ignore_errors=True)
        findings.manifest = replace(findings.manifest, best=best).with_files(folder)
        write_json(folder / MANIFEST, asdict(findings.manifest))

    write_directory(directory / FOLDER, fill, {MANIFEST, SHORTLIST, *BACKENDS})
    return findings


def _precisions(backend: str, model: SavedModel) -> Sequence[str]:
    """The precisions of a backend's conversions of a model."""
    if backend == "compiled" and isinstance(model, Generator):
        return GENERATOR_PRECISIONS
    return PRECISIONS_OF[backend]


def check_names(
    backends: Sequence[str],
    precisions: Sequence[str],
    threads: Sequence[int],
    uses: Sequence[str] = (),
) -> None:
    """Raises UserError for an unknown name, and for more threads than cores."""
    for kind, names, known in (
        ("backend", backends, BACKENDS),
        ("precision", precisions, PRECISIONS),
        ("use", uses, USES),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"unknown {kind} {name}; known are {', '.join(known)}")
    for count in threads:
        if not 1 <= count <= cores():
            raise UserError(f"threads must be from 1 to {cores()}, the cores here, not {count}")


@dataclass
class _Converter:
    """Builds, proves and opens conversions of a model in a folder.

    Attributes:
        directory: of the model.
        work: the folder.
        conversions: the net's facts for each conversion that passed.
        has_equal_beams: of CTranslate2; it excludes tokens that the model suppresses before the
            softmax, so that beams of a model to which these are probable differ.
    """

    model: SavedModel
    directory: Path
    work: Path
    tolerance: float | None
    findings: Findings
    conversions: dict[Conversion, dict[str, Any]] = field(default_factory=dict)
    has_equal_beams: bool = True

    def build(self, conversion: Conversion, prover: Prover) -> None:
        """Build and prove a conversion: add it to `conversions`, or the reason to `refused`."""
        backend, precision = conversion
        path, findings = conversion_path(self.work, *conversion), self.findings
        try:
            known = None
            if backend != CTranslate2.name:  # whose conversion takes seconds
                known = reusable_conversion(self.directory, *conversion)
            if known is not None:
                shutil.copytree(conversion_path(self.directory, *conversion), path)
            facts = known or convert_model(self.model, self.work, precision, backend)
            opened = open_conversion(self.directory, self.work, *conversion, facts, Settings(1))
            proof = prover.prove(opened)
            reason = proof.failure(self.tolerance)
            same_beams = 1.0 if proof.same_beams is None else proof.same_beams
            if precision == "float32" and same_beams < 1:
                if backend == CTranslate2.name:
                    self.has_equal_beams = False
                else:
                    reason = f"{100 * (1 - same_beams):.2g}% of its beam searches differ"
        except UserError as error:
            reason = str(error).replace(f"{path}", "it")
        if reason:
            findings.refused[f"{backend} {precision}"] = reason
            shutil.rmtree(path, ignore_errors=True)
            return
        if backend == CTranslate2.name:
            facts = facts | {"has_equal_beams": self.has_equal_beams}
        self.conversions[conversion] = facts
        findings.proofs[f"{backend} {precision}"] = proof
        findings.manifest = findings.manifest.with_conversion(
            backend, precision, facts, asdict(proof)
        )

    def open_choice(self, choice: BackendChoice) -> Backend:
        """The backend of a choice: the net itself, or a conversion that passed."""
        if choice.backend == Eager.name:
            model = self.model
            return Eager(model.net, model.config.max_length, model.shortlist, choice.settings)
        conversion = choice.backend, choice.precision
        facts = self.conversions[conversion]
        return open_conversion(self.directory, self.work, *conversion, facts, choice.settings)

    def shortlist(self, pairs: Pairs, prover: Prover) -> Shortlist | None:
        """Make and prove a shortlist; set it for the model and the conversions that support it.

        None: it loses too much; the reason is in `refused`.
        """
        model, findings = self.model, self.findings
        if not isinstance(model, Translator):
            raise UserError(f"only translators have a shortlist, and this model is a {model.kind}")
        src, tgt = model.src_tokenizer, model.tgt_tokenizer
        ends = model.end_ids()
        sizes = src.vocab_size, tgt.vocab_size
        shortlist = make_shortlist(pairs, *sizes, always=ends, shared=src is tgt)
        proof = prover.prove(Eager(model.net, model.config.max_length, shortlist))
        if reason := replace(proof, precision="shortlist").failure(self.tolerance):
            findings.refused["a shortlist"] = reason
            return None
        held_out = prover.pairs()
        findings.shortlist = ShortlistReport(
            shortlist.mean_size(held_out), shortlist.recall(held_out), proof
        )
        model.shortlist = shortlist
        try:
            for backend, precision in self.conversions:
                if backend == CTranslate2.name:
                    write_vocabulary_map(shortlist, conversion_path(self.work, backend, precision))
        except UserError as error:
            findings.refused[f"a shortlist in {CTranslate2.name}"] = str(error)
        return shortlist
