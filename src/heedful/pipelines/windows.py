"""Prompts whose batches are in progress."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from heedful.backends.base import GenerationRequest, own_stop_rule
from heedful.generation.outputs import Counts, Hypothesis
from heedful.options import Options
from heedful.pipelines.base import Texts
from heedful.pipelines.batching import split_among
from heedful.pipelines.generations import Generation, to_generation

if TYPE_CHECKING:
    from heedful.pipelines.text_generation import Generator


class _Batch(NamedTuple):
    """A batch in progress.

    Attributes:
        indices: of its prompts in the window.
        wait: waits for its outputs; a prompt has none where the backend could not give them.
    """

    indices: list[int]
    request: GenerationRequest
    wait: Callable[[], list[list[Hypothesis]]]


class Window:
    """The prompts of a call, or of a part of a stream, whose batches are started at once.

    Args:
        first: index of the first prompt among all prompts.
        waits: `generations` is called at once, so that a single batch need not be submitted.
        with_texts: False: outputs have empty texts.
        counts: see `Generator.generations`.
    """

    def __init__(
        self,
        model: "Generator",
        prompts: Texts,
        first: int,
        options: Options,
        *,
        waits: bool,
        with_texts: bool = True,
        counts: Sequence[Counts] | None = None,
    ) -> None:
        self._model, self._first, self._options = model, first, options
        has_texts = with_texts and model.has_tokenizer
        self._decode = model.tgt_tokenizer.decode if has_texts else None
        self._names_failures = counts is None
        self._complete: dict[int, list[Generation]] = {}  # by index in the window
        numbered = replace(
            options,
            first_number=options.first_number + first,
            numbers=options.numbers and options.numbers[first : first + len(prompts)],
        )
        self._sources = model.sources(prompts, options)
        self._rows = rows = model.prompt_ids(self._sources, numbered)
        workers = model.backend.settings.workers if model.backend else 1
        if len(rows) == 1 and rows[0]:
            batches = [[0]]
        else:
            batches = split_among(workers, model.batches(rows, options, workers))
        self._batches: list[_Batch] = []
        for indices in batches:
            batch = [rows[index] for index in indices]
            request = model.request_of_batch(batch, [first + i for i in indices], options, counts)
            if options.on_output is not None:
                request = request._replace(on_output=partial(self._report, indices))
            backend = model.backend_for(batch, request)
            if waits and len(batches) == 1:
                wait: Callable[[], list[list[Hypothesis]]] = partial(
                    backend.outputs, batch, request
                )
            else:
                wait = backend.submit(batch, request)
            self._batches.append(_Batch(indices, request, wait))

    def generations(self) -> list[list[Generation]]:
        """The outputs of each prompt; waits for all."""
        rows, options, model = self._rows, self._options, self._model
        results = [[] if row else [Hypothesis([], 0.0, True, 0.0, [])] for row in rows]
        blank = [index for index, row in enumerate(rows) if not row]
        if options.progress:
            options.progress(len(blank))
        for row, index in enumerate(blank):
            self._report(blank, row, results[index])
        for batch in self._batches:
            for row, outputs in enumerate(self._outputs(batch)):
                for output in outputs:
                    if self._names_failures and output.failure is not None:
                        number = options.number(batch.request.prompt_numbers[row])
                        model.report_failure(output.failure, number)
                results[batch.indices[row]] = outputs
                self._report(batch.indices, row, outputs)
            if options.progress:
                options.progress(len(batch.indices))
        left = [index for index in range(len(rows)) if index not in self._complete]
        found = [self._with_texts(results[index]) for index in left]
        sources = [self._sources[index] for index in left]
        kept = model.kept(sources, found, options)
        for index, outputs in zip(left, kept, strict=True):
            self._complete[index] = outputs
            if options.on_output is not None:
                options.on_output(self._first + index, outputs)
        return [self._complete[index] for index in range(len(rows))]

    def _with_texts(self, outputs: list[Hypothesis]) -> list[Generation]:
        return [to_generation(output, self._decode, self._options.stop) for output in outputs]

    def _report(self, indices: list[int], row: int, outputs: list[Hypothesis]) -> None:
        """Call `on_output` for a prompt of a batch, once; those that need a further search are
        searched together, at the end."""
        options, index = self._options, indices[row]
        if options.on_output is None or index in self._complete:
            return
        source, found = self._sources[index : index + 1], [self._with_texts(outputs)]
        [kept] = self._model.kept(source, found, options, at_once=True)
        if kept is not None:
            self._complete[index] = kept
            options.on_output(self._first + index, kept)

    def _outputs(self, batch: _Batch) -> list[list[Hypothesis]]:
        """The outputs of a batch; those that the backend could not give are the net's."""
        outputs, request, model = batch.wait(), batch.request, self._model
        missing = [index for index, of_row in enumerate(outputs) if not of_row]
        if missing:
            assert model.backend is not None
            rows = [self._rows[batch.indices[index]] for index in missing]
            remaining = request.select(missing)
            specials = model.src_tokenizer.special_ids if model.has_tokenizer else frozenset()
            if not all(map(specials.issuperset, rows)):  # without words none is decoded there
                name = f"{model.backend.name} ends beams at the length limit otherwise than the net"
                model.note_once(f"{name}, so texts with outputs of this length run eager")
            if rule := own_stop_rule(model.backend, request.options):  # as of the other rows
                remaining = remaining._replace(options=replace(request.options, stop_rule=rule))
            for index, of_row in zip(missing, model.eager.outputs(rows, remaining), strict=True):
                outputs[index] = of_row
        return outputs
