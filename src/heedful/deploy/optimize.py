"""Choosing the backend of a model on this machine, and recording the choice in `backends.json`."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from heedful.backends.base import Backend, Settings
from heedful.backends.ctranslate2.conversion import PRECISIONS
from heedful.backends.ctranslate2.runtime import CTranslate2, write_vocabulary_map
from heedful.backends.hardware import cores
from heedful.backends.manifest import (
    FOLDER,
    RECORD,
    SHORTLIST,
    Choice,
    Kind,
    Record,
    Use,
    digest,
    place_of,
)
from heedful.backends.registry import open_made
from heedful.backends.shortlist import Pairs, Shortlist, make_shortlist
from heedful.backends.torch.eager import Eager
from heedful.deploy.convert import make_form, standing_form
from heedful.deploy.measure import Form, candidates, measure
from heedful.deploy.prove import Proof, Prover
from heedful.errors import UserError
from heedful.files import write_directory, write_json
from heedful.pipelines.base import SavedModel
from heedful.pipelines.loading import tokenizer_files
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator
from heedful.progress import track

BACKENDS = ("eager", "ctranslate2", "compiled")
_WRITERS = ("float32", "int8")  # precisions of the third for what writes
USES: tuple[Use, ...] = get_args(Use)


@dataclass
class Findings:
    """The result of `optimize`.

    Attributes:
        record: what is kept.
        proofs: of each form that is kept, by its backend and precision.
        refused: by form, why it is not kept.
        rates: (use, setting, tokens a second), of a use the best first.
        shortlist: its size, recall and proof, where it was requested and is kept.
    """

    record: Record
    proofs: dict[str, Proof] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    rates: list[tuple[Use, Choice, float]] = field(default_factory=list)
    shortlist: "Listing | None" = None


@dataclass(frozen=True)
class Listing:
    """A shortlist on held-out text.

    Attributes:
        size: target tokens that a sentence may have, on average.
        recall: share of the references' tokens that are on their sentences' lists.
        proof: of the net with it against the net without.
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
    backends: Sequence[str] = BACKENDS,
    precisions: Sequence[str] = PRECISIONS,
    uses: Sequence[Use] = USES,
    tolerance: float | None = None,
    threads: Sequence[int] = (),
    pairs: Pairs | None = None,
) -> Findings:
    """Build, prove and measure what can run a model, and keep the best in `directory/backends`.

    Args:
        model: opened eager, from `directory`.
        texts, answers: held-out text, as of `Prover`.
        tolerance: what a form other than float32 may lose (`heedful.deploy.prove.Proof`).
        threads: of each worker; default: one, and all cores.
        pairs: of a translator, ids of its training pairs: a shortlist is counted of them, and kept
            where it loses no more than a form may; default: there will be none.

    Raises:
        UserError: unknown names; more threads than cores; no held-out text; nothing that is asked
            for runs the model, with every reason.
    """
    check_asked(backends, precisions, threads)
    real = [text for text in texts if text.strip()]
    if not real:
        raise UserError("the validation text is empty; give it at least one line")
    findings = Findings(Record.new(directory, cast(Kind, type(model).__name__)))

    def fill(beside: Path) -> None:
        bench = _Bench(model, directory, beside / "work", tolerance, findings)
        model.shortlist = None
        prover = None
        wanted = [(e, p) for e in backends for p in precisions if _exists(e, p, model)]
        if wanted or pairs is not None:
            prover = Prover(model, texts, answers)
        with track("building and proving", len(wanted)) as advance:
            for form in wanted:
                assert prover is not None
                bench.build(form, prover)
                advance(1)
        if prover is not None and pairs is not None:
            with track("counting a shortlist", 1) as advance:
                made = bench.shortlist(pairs, prover)
                advance(1)
            if made is not None:
                made.save(beside / SHORTLIST, digest(tokenizer_files(directory)))
        settings = candidates(model, bench.forms, real, backends, threads, uses)
        if not settings:
            reasons = "; ".join(dict.fromkeys(findings.refused.values()))
            raise UserError(f"nothing that was asked for runs this model: {reasons}")
        findings.rates = measure(model, real, settings, bench.open_choice)
        best = {use: choice for use, choice, _ in reversed(findings.rates)}
        for backend in {backend for backend, _ in bench.forms}:
            (bench.work / FOLDER / backend).rename(beside / backend)
        shutil.rmtree(bench.work, ignore_errors=True)
        findings.record = replace(findings.record, best=best).with_files(beside)
        write_json(beside / RECORD, asdict(findings.record))

    write_directory(directory / FOLDER, fill, {RECORD, SHORTLIST, *BACKENDS})
    return findings


def _exists(backend: str, precision: str, model: SavedModel) -> bool:
    """Whether a backend has such a form."""
    if backend == "compiled":
        return precision in _WRITERS or not isinstance(model, Generator)
    return backend == CTranslate2.name


def check_asked(backends: Sequence[str], precisions: Sequence[str], threads: Sequence[int]) -> None:
    """Raises UserError for a name that is none, and for more threads than cores."""
    for what, given, known in (
        ("backend", backends, BACKENDS),
        ("precision", precisions, PRECISIONS),
    ):
        for name in given:
            if name not in known:
                raise UserError(f"no {what} {name}; there are {', '.join(known)}")
    for count in threads:
        if not 1 <= count <= cores():
            raise UserError(f"threads must be from 1 to {cores()}, the cores here, not {count}")


@dataclass
class _Bench:
    """A model and its forms in a folder, where they are built, proved and opened.

    Attributes:
        directory: where the model stands.
        forms: the facts of those that passed.
    """

    model: SavedModel
    directory: Path
    work: Path
    tolerance: float | None
    findings: Findings
    forms: dict[Form, dict[str, Any]] = field(default_factory=dict)

    def build(self, form: Form, prover: Prover) -> None:
        """Build a form and prove it: it stays in `forms`, or the reason in `refused`."""
        backend, precision = form
        place, findings = place_of(self.work, *form), self.findings
        try:
            known = None if backend == CTranslate2.name else standing_form(self.directory, *form)
            if known is not None:
                shutil.copytree(place_of(self.directory, *form), place)
            facts = known or make_form(self.model, self.work, precision, backend)
            opened = open_made(self.directory, self.work, *form, facts, Settings(1))
            proof = prover.prove(opened)
            reason = proof.fails(self.tolerance)
        except UserError as error:
            reason = str(error).replace(f"{place}", "it")
        if reason:
            findings.refused[f"{backend} {precision}"] = reason
            shutil.rmtree(place, ignore_errors=True)
            return
        self.forms[form], findings.proofs[f"{backend} {precision}"] = facts, proof
        findings.record = findings.record.with_form(backend, precision, facts, asdict(proof))

    def open_choice(self, choice: Choice) -> Backend:
        """The backend of a choice: the net itself, or a form that passed."""
        if choice.backend == Eager.name:
            model = self.model
            return Eager(model.net, model.config.max_length, model.shortlist, choice.settings)
        form = choice.backend, choice.precision
        return open_made(self.directory, self.work, *form, self.forms[form], choice.settings)

    def shortlist(self, pairs: Pairs, prover: Prover) -> Shortlist | None:
        """The shortlist that the model has from now on, and its forms where they can.

        None: it loses too much, and `refused` says so.
        """
        model, findings = self.model, self.findings
        if not isinstance(model, Translator):
            raise UserError(f"a shortlist is of a translator, but this model is a {model.kind}")
        src, tgt = model.src_tokenizer, model.tgt_tokenizer
        ends = model.end_ids()
        made = make_shortlist(pairs, src.vocab_size, tgt.vocab_size, always=ends, shared=src is tgt)
        proof = prover.prove(Eager(model.net, model.config.max_length, made))
        if reason := replace(proof, precision="shortlist").fails(self.tolerance):
            findings.refused["a shortlist"] = reason
            return None
        held_out = prover.pairs()
        findings.shortlist = Listing(made.mean_size(held_out), made.recall(held_out), proof)
        model.shortlist = made
        try:
            for backend, precision in self.forms:
                if backend == CTranslate2.name:
                    write_vocabulary_map(made, place_of(self.work, backend, precision))
        except UserError as error:
            findings.refused[f"a shortlist in {CTranslate2.name}"] = str(error)
        return made
