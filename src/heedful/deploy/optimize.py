"""What runs a model best on this machine: forms built, proved on held-out text, measured, kept."""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, cast, get_args

from heedful.backends.base import Backend, Settings
from heedful.backends.ctranslate2.conversion import PRECISIONS
from heedful.backends.ctranslate2.runtime import CTranslate2, write_vocabulary_map
from heedful.backends.manifest import (
    FOLDER,
    RECORD,
    SHORTLIST,
    Choice,
    Kind,
    Record,
    Use,
    cores,
    digest,
    open_made,
    place_of,
)
from heedful.backends.shortlist import Pairs, Shortlist, make_shortlist
from heedful.backends.torch.eager import Eager
from heedful.deploy.convert import Proof, Prover, cut_ids, make_form, standing_form
from heedful.errors import UserError
from heedful.files import write_directory, write_json
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.loading import tokenizer_files
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator

ENGINES = ("eager", "ctranslate2", "compiled")
_WRITERS = ("float32", "int8")  # precisions of the third for what writes
USES: tuple[Use, ...] = get_args(Use)
_SINGLES, _TOGETHER = 12, 256  # texts that are timed one at a time, and together
_ALONE = 64  # texts together where nothing runs side by side
# Of each round of timing: the share of the best rate, by medians so far, to stay in.
_STAY = (0.7, 0.7, 0.9, 0.9, 0.9, 0.9)
_SHORTEST, _LONGEST = 0.1, 2.0  # seconds of one: again from the first text, and no further text
_BATCHES = (8, 16, 32, 64)  # prompts of mean length that are worked on together
_NEW_TOKENS = 32  # that a language model goes on with

Progress = Callable[[str, int, int], None]
Form = tuple[str, str]  # engine and precision


@dataclass
class Findings:
    """What was found out.

    Attributes:
        record: what is kept.
        proofs: of each form that is kept, by its engine and precision.
        refused: by form, why it is not kept.
        rates: (use, setting, tokens a second), of a use the best first.
        shortlist: what one is worth, where it was asked for and is kept.
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
    engines: Sequence[str] = ENGINES,
    precisions: Sequence[str] = PRECISIONS,
    uses: Sequence[Use] = USES,
    tolerance: float | None = None,
    threads: Sequence[int] = (),
    pairs: Pairs | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Findings:
    """Build, prove and measure what can run a model, and keep the best in `directory/engines`.

    Args:
        model: opened eager, from `directory`.
        texts, answers: held-out text, as of `Prover`.
        tolerance: what a form other than float32 may lose (`heedful.deploy.convert.Proof`).
        threads: of each worker; default: one, and all cores.
        pairs: of a translator, ids of its training pairs: a shortlist is counted of them, and kept
            where it loses no more than a form may; default: there will be none.
        progress: told what is done, how much of it, of how much.

    Raises:
        UserError: unknown names; more threads than cores; no held-out text; nothing that is asked
            for runs the model, with every reason.
    """
    check_asked(engines, precisions, threads)
    real = [text for text in texts if text.strip()]
    if not real:
        raise UserError("the validation text is empty; give it at least one line")
    findings = Findings(Record.new(directory, cast(Kind, type(model).__name__)))

    def fill(beside: Path) -> None:
        bench = _Bench(model, directory, beside / "work", tolerance, progress, findings)
        model.shortlist = None
        prover = None
        wanted = [(e, p) for e in engines for p in precisions if _exists(e, p, model)]
        if wanted or pairs is not None:
            prover = Prover(model, texts, answers)
        for done, form in enumerate(wanted):
            progress("building and proving", done, len(wanted))
            assert prover is not None
            bench.build(form, prover)
        if prover is not None and pairs is not None:
            progress("counting a shortlist", 0, 1)
            if made := bench.shortlist(pairs, prover):
                made.save(beside / SHORTLIST, digest(tokenizer_files(directory)))
        settings = bench.settings(real, engines, threads, uses)
        if not settings:
            reasons = "; ".join(dict.fromkeys(findings.refused.values()))
            raise UserError(f"nothing that was asked for runs this model: {reasons}")
        findings.rates = bench.rates(real, settings)
        best = {use: choice for use, choice, _ in reversed(findings.rates)}
        for engine in {engine for engine, _ in bench.forms}:
            (bench.work / FOLDER / engine).rename(beside / engine)
        shutil.rmtree(bench.work, ignore_errors=True)
        findings.record = replace(findings.record, best=best).with_files(beside)
        write_json(beside / RECORD, asdict(findings.record))

    write_directory(directory / FOLDER, fill, {RECORD, SHORTLIST, *ENGINES})
    return findings


def _exists(engine: str, precision: str, model: SavedModel) -> bool:
    """Whether an engine has such a form."""
    if engine == "compiled":
        return precision in _WRITERS or not isinstance(model, Generator)
    return engine == CTranslate2.name


def check_asked(engines: Sequence[str], precisions: Sequence[str], threads: Sequence[int]) -> None:
    """Raises UserError for a name that is none, and for more threads than cores."""
    for what, given, known in (
        ("engine", engines, ENGINES),
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
    """A model and its forms in a folder, where they are built, proved and measured.

    Attributes:
        directory: where the model stands.
        forms: the facts of those that passed.
    """

    model: SavedModel
    directory: Path
    work: Path
    tolerance: float | None
    progress: Progress
    findings: Findings
    forms: dict[Form, dict[str, Any]] = field(default_factory=dict)

    def build(self, form: Form, prover: Prover) -> None:
        """Build a form and prove it: it stays in `forms`, or the reason in `refused`."""
        engine, precision = form
        place, findings = place_of(self.work, *form), self.findings
        try:
            known = None if engine == CTranslate2.name else standing_form(self.directory, *form)
            if known is not None:
                shutil.copytree(place_of(self.directory, *form), place)
            facts = known or make_form(self.model, self.work, precision, engine, self.progress)
            proof = prover.prove(self._open(form, facts, Settings(1)))
            reason = proof.fails(self.tolerance)
        except UserError as error:
            reason = str(error).replace(f"{place}", "it")
        if reason:
            findings.refused[f"{engine} {precision}"] = reason
            shutil.rmtree(place, ignore_errors=True)
            return
        self.forms[form], findings.proofs[f"{engine} {precision}"] = facts, proof
        findings.record = findings.record.with_form(engine, precision, facts, asdict(proof))

    def _open(self, form: Form, facts: dict[str, Any], settings: Settings) -> Backend:
        return open_made(self.directory, self.work, *form, facts, settings)

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
            for engine, precision in self.forms:
                if engine == CTranslate2.name:
                    write_vocabulary_map(made, place_of(self.work, engine, precision))
        except UserError as error:
            findings.refused[f"a shortlist in {CTranslate2.name}"] = str(error)
        return made

    # --- measuring ------------------------------------------------------------------------------

    def settings(
        self,
        texts: Sequence[str],
        engines: Sequence[str],
        threads: Sequence[int],
        uses: Sequence[Use],
    ) -> list[tuple[Use, Choice]]:
        """Everything that is worth a try: one worker for one text, all cores in some way for
        many."""
        model = self.model
        writes = isinstance(model, Generator)
        beams = model.options().rows if isinstance(model, Generator) else 1
        more = _NEW_TOKENS if isinstance(model, LanguageModel) else 0
        lengths = [len(row) + more for row in _rows(model, texts[:_TOGETHER])]
        mean = sum(lengths) / len(lengths)
        budgets = [max(1, round(mean * size * beams)) for size in _BATCHES]
        forms = [(Eager.name, "float32")] if Eager.name in engines else []
        # A shortlist is nothing that compiled graphs know.
        forms += [form for form in self.forms if form[0] != "compiled" or not model.shortlist]
        found: list[tuple[Use, Choice]] = []
        for (engine, precision), count in product(forms, sorted(set(threads) or {1, cores()})):
            is_alone = engine != CTranslate2.name
            workers = 1 if is_alone else max(1, cores() // count)
            if "latency" in uses:
                found.append(("latency", Choice(engine, precision, count)))
            if "throughput" in uses:
                sizes = budgets[-1:] if is_alone and writes else budgets
                chosen = [Choice(engine, precision, count, workers, each) for each in sizes]
                found += [("throughput", choice) for choice in chosen]
        return found

    def rates(
        self, texts: Sequence[str], settings: list[tuple[Use, Choice]]
    ) -> list[tuple[Use, Choice, float]]:
        """The median rate of each setting over rounds in turn; who is far behind leaves."""
        model = self.model
        count = min(_SINGLES, len(texts))
        singles = [[texts[number * len(texts) // count]] for number in range(count)]
        rates: dict[tuple[Use, Choice], list[float]] = {each: [] for each in settings}
        medians: dict[tuple[Use, Choice], float] = {}
        left, done = settings, 0
        for number, share in enumerate(_STAY):
            total = done + len(left) * (len(_STAY) - number)
            for use, choice in left:
                size = _TOGETHER if choice.engine == CTranslate2.name else _ALONE
                parts = [texts[first : first + size] for first in range(0, len(texts), size)]
                with self._run_by(choice):
                    _rate(model, singles[:1], choice)  # the first call of an engine is no measure
                    rate = _rate(model, singles if use == "latency" else parts, choice)
                rates[use, choice].append(rate)
                medians[use, choice] = statistics.median(rates[use, choice])
                done += 1
                self.progress("measuring", done, total)
            best = {use: max(medians[each] for each in left if each[0] == use) for use, _ in left}
            left = [each for each in left if medians[each] >= share * best[each[0]]]
        self.progress("measuring", done, done)
        found = [(use, choice, medians[use, choice]) for use, choice in settings]
        return sorted(found, key=lambda each: (each[0], -each[2]))

    @contextmanager
    def _run_by(self, choice: Choice) -> Iterator[None]:
        """The model run by a choice, and afterwards as before."""
        model, form = self.model, (choice.engine, choice.precision)
        engine: Any
        if choice.engine == Eager.name:
            net, longest = model.net, model.config.max_length
            engine = Eager(net, longest, model.shortlist, choice.settings)
        else:
            engine = self._open(form, self.forms[form], choice.settings)
        before, model.engine = model.engine, engine
        try:
            yield
        finally:
            model.engine = before


def _rate(model: SavedModel, parts: Sequence[Sequence[str]], choice: Choice) -> float:
    """Tokens a second, written or read, over parts of the texts."""
    budget = {} if choice.batch_tokens is None else {"batch_tokens": choice.batch_tokens}
    options: dict[str, Any] = {**budget, "too_long": "truncate", "scores": False}
    if isinstance(model, LanguageModel):
        options["max_new_tokens"] = _NEW_TOKENS
    units, seconds, began = 0, 0.0, time.perf_counter()
    for number, part in enumerate(cycle(parts)):
        if seconds > (_SHORTEST if number >= len(parts) else _LONGEST):
            break
        if isinstance(model, Generator):
            found = model.generations(_rows(model, part), **options)
            units += sum(len(outputs[0].ids) for outputs in found)
        else:
            rows = _rows(model, part)
            units += sum(map(len, rows))
            read: Any = model.classify if isinstance(model, Classifier) else model.vectors
            read(rows, **budget)
        seconds = time.perf_counter() - began
    return units / seconds


def _rows(model: SavedModel, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, cut to what the model reads; a language model goes on from their beginnings."""
    rows = cut_ids(model, texts)
    if not isinstance(model, LanguageModel):
        return rows
    longest = max(1, min(_NEW_TOKENS, model.config.max_length // 2))
    return [row[:longest] for row in rows]
