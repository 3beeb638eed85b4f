"""The search of an output: a beam as a tree; the distributions of greedy decoding and sampling."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.backends.torch.generating import TorchGenerator, stop_function
from heedful.errors import UserError, describe
from heedful.generation.beam import Beams, StepChoice
from heedful.generation.sampling import sample_steps
from heedful.generation.search import beam_search
from heedful.generation.token_rules import Context, Rule
from heedful.insight.plots import new_figure, plain
from heedful.insight.reading import Text, evaluating, pieces
from heedful.pipelines.base import SavedModel
from heedful.pipelines.requests import options_for_ids
from heedful.pipelines.text_generation import Generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Fate = Literal["kept", "pruned", "finished", "cut"]


@dataclass(frozen=True)
class Node:
    """A hypothesis of a search: a token after the tokens of its parents.

    Attributes:
        parent: index of its parent among the nodes; -1: the start.
        step: number of its tokens, from 1.
        token: the piece of its last token.
        log_prob: natural log-probability of that token.
        total: of all its tokens.
        score: by which finished hypotheses are ranked; of an unfinished one, that at its length.
        fate: `kept` in the beam after its step, `pruned`, `finished` by an end token, or `cut` by
            the length limit.
    """

    parent: int
    step: int
    id: int
    token: str
    log_prob: float
    total: float
    score: float
    fate: Fate


_REASONS = {
    "eos": "an end token was chosen",
    "stop": "a stop text was reached",
    "length": "the length limit was reached: {0:.0f} tokens",
    "dead_end": "no token is allowed next",
    "beam_full": "beam_full: {0:.0f} hypotheses have ended",
    "heuristic": "heuristic: the best open hypothesis has a score of {0:.3f}, the worst result "
    "kept has {1:.3f}",
    "optimal": "optimal: an open hypothesis can reach a score of {0:.3f}, the worst result kept "
    "has {1:.3f}",
}


@dataclass(frozen=True)
class Stop:
    """Why a search ended; as a string in words.

    Attributes:
        kind: `eos`, `stop`, `length`, `dead_end`, or the stop rule that held.
        numbers: the limit; the hypotheses that ended; or the score that an open hypothesis can
            reach (`optimal`) or has (`heuristic`), and the score of the worst result kept.
    """

    kind: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        return _REASONS[self.kind].format(*self.numbers)


@dataclass(frozen=True)
class SearchTree:
    """A beam search.

    Attributes:
        nodes: in the order of steps. Of the candidates that were pruned only the best are here, as
            many as the beam holds in each step.
        best: indices of the nodes of the best output, from its first token.
        text: that output.
        stop: why the search ended.
        beam_size, stop_rule: of the search.
    """

    nodes: tuple[Node, ...]
    best: tuple[int, ...]
    text: str
    stop: Stop
    beam_size: int
    stop_rule: str

    def plot(self) -> "Figure":
        """The tree, a column for each step; the best output in bold."""
        columns = max((node.step for node in self.nodes), default=1)
        ranks: dict[int, int] = {}
        heights = []
        for node in self.nodes:
            ranks[node.step] = ranks.get(node.step, 0) + 1
            heights.append(-ranks[node.step])
        figure, axes = new_figure(3 * columns, 1 + max(ranks.values(), default=1))
        for index, node in enumerate(self.nodes):
            start = (0.0, -1.0) if node.parent < 0 else (
                float(self.nodes[node.parent].step), float(heights[node.parent])
            )  # fmt: skip
            is_best = index in self.best
            line = "#2563c9" if is_best else "#c0c0c0"
            ends = [start[0], node.step], [start[1], heights[index]]
            axes.plot(*ends, zorder=0, color=line, linewidth=1 + is_best)
            label = f"{plain(node.token)}\n{node.total:.2f}"
            color = "gray" if node.fate == "pruned" else "black"
            weight = "bold" if is_best else "normal"
            axes.text(
                node.step, heights[index], label, color=color, weight=weight, fontsize=7,
                ha="center", va="center", bbox={"color": "white", "pad": 0.5},
            )  # fmt: skip
        axes.set_axis_off()
        axes.set_title(plain(str(self.stop)))
        return figure


@dataclass(frozen=True)
class Distribution:
    """The most probable next tokens after a rule.

    Attributes:
        rule: "model", before any rule, or the name of the rule.
        ids, tokens, probabilities: best first.
        num_allowed: tokens of probability above 0.
        entropy: in nats.
    """

    rule: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]
    num_allowed: int
    entropy: float


@dataclass(frozen=True)
class TokenChoice:
    """One step: the distributions before and after each rule; the token, its final probability."""

    distributions: tuple[Distribution, ...]
    id: int
    token: str
    probability: float


@dataclass(frozen=True)
class Sampling:
    """Greedy decoding or a sample.

    Attributes:
        steps: one for each new token.
        text: the output.
        stop: why it ended.
        seed: of the sample; None: greedy decoding.
    """

    steps: tuple[TokenChoice, ...]
    text: str
    stop: Stop
    seed: int | None


def search_tree(model: SavedModel, text: Text, **options: Any) -> SearchTree:
    """The beam search of an output, step by step; it is the search of `model.generate`.

    Args:
        text: a source or prompt, or its ids.
        options: fields of `heedful.options.Options`. The beam size is the model's, at least 2.

    Raises:
        UserError: an encoder; options of another search (sampling, constraints, diverse beams).

    >>> figure = search_tree(heedful.load("runs/mine"), "the dog sat", beam_size=2).plot()
    """
    generator, row, request, backend = _prepare(model, text, options, is_beam=True)
    settings, recorder = request.options, _Recorder(generator, request)
    width, rule = settings.beam_size or 1, settings.stop_rule or "optimal"
    with evaluating(generator.net):
        start, state = backend.open([row], request, width)
        arguments = backend.arguments([row], request)
        [outputs] = beam_search(
            state.next_log_probs,
            start,
            state=state,
            beam_size=width,
            num_return=settings.num_return,
            stop=rule,
            force_eos=_forces_eos(request),
            observe=recorder.observe,
            **vars(request.score),
            **arguments,
        )
    best = recorder.path(outputs[0].ids)
    output = generator.tgt_tokenizer.decode(outputs[0].ids) if generator.has_tokenizer else ""
    return SearchTree(tuple(recorder.nodes), best, output, recorder.stop, width, rule)


def sampling_steps(
    model: SavedModel, text: Text, *, top_k_shown: int = 10, **options: Any
) -> Sampling:
    """The next-token distributions of one output, before and after each rule.

    Args:
        top_k_shown: tokens of each distribution.
        text, options: as in `search_tree`; with a `temperature` it samples, else it is greedy.

    Raises:
        UserError: an encoder; a beam size above 1; constraints by a search; `top_k_shown` below 1.

    >>> steps = sampling_steps(heedful.load("runs/novel"), "the dog", temperature=0.8).steps
    """
    if not isinstance(top_k_shown, int) or top_k_shown < 1:
        raise UserError(f"top_k_shown must be at least 1, not {describe(top_k_shown)}")
    generator, row, request, backend = _prepare(model, text, options, is_beam=False)
    steps: dict[int, list[tuple[str, Tensor]]] = {}
    tokens, reason = list[int](), "length"
    with evaluating(generator.net):
        start, state = backend.open([row], request, 1)
        arguments = backend.arguments([row], request)
        rules: Sequence[Rule] = arguments.pop("rules")
        arguments["rules"] = [_first_rule(steps), *(_recorded(rule, steps) for rule in rules)]
        for step in sample_steps(
            state.next_log_probs,
            start,
            state=state,
            seeds=request.seeds,
            stop=stop_function(request),
            steps_per_read=1,
            **arguments,
        ):
            tokens += step.tokens
            reason = next(iter(step.ended.values()), reason)
    tokenizer = generator.tgt_tokenizer if generator.has_tokenizer else None
    choices = []
    for (_, stages), token in zip(sorted(steps.items()), tokens, strict=False):
        distributions = []
        for name, log_probs in stages:
            probabilities = log_probs.double().softmax(-1)
            top = probabilities.topk(min(top_k_shown, len(probabilities)))
            allowed = probabilities[probabilities > 0]
            ids = [i for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True) if p]
            distributions.append(
                Distribution(
                    name,
                    tuple(ids),
                    pieces(tokenizer, ids),
                    tuple(top.values.tolist()[: len(ids)]),
                    len(allowed),
                    max(0.0, -float((allowed * allowed.log()).sum())),
                )
            )
        probability = float(stages[-1][1].double().softmax(-1)[token])
        choices.append(
            TokenChoice(tuple(distributions), token, pieces(tokenizer, [token])[0], probability)
        )
    output = generator.tgt_tokenizer.decode(tokens) if generator.has_tokenizer else ""
    seed = None if request.seeds is None else request.seeds[0]
    limit = (float(request.max_new_tokens[0]),) if reason == "length" else ()
    return Sampling(tuple(choices), output, Stop(reason, limit), seed)


def _prepare(
    model: SavedModel, text: Text, options: dict[str, Any], *, is_beam: bool
) -> tuple[Generator, list[int], GenerationRequest, TorchGenerator]:
    """The ids of a text, the request of its output, and the search of the net."""
    if not isinstance(model, Generator) or not model.has_net:
        raise UserError(f"a {model.kind} has no search: it generates no text")
    settled = model.options(**options)
    if settled.samples and is_beam:
        raise UserError("a sample is no beam search; leave out the sampling options")
    if is_beam and not settled.by_beams:
        options = {**options, "beam_size": 2}
    if not is_beam and settled.by_beams:
        if "beam_size" in settled.explicit:
            raise UserError("a beam search is shown as a tree; leave out beam_size, or give 1")
        options = {**options, "beam_size": 1}
    [row] = model.prompt_ids([text], settled)  # type: ignore[arg-type]
    if not row:
        raise UserError("the text is empty, and so is its output")
    others = options_for_ids(model, options)
    request = model.request([row], **others)
    for name in ("require", "draft", "coverage_penalty"):
        if getattr(request.options, name):
            raise UserError(f"the search with {name} is not shown; leave {name} out")
    if request.options.num_groups > 1:
        raise UserError("diverse beams are not shown; leave num_groups out")
    num_return = request.options.num_return if is_beam else 1
    shown = replace(request.options, num_return=num_return, shortlist=False)
    model.eager.prepare()
    return model, row, request._replace(options=shown), model.eager


def _forces_eos(request: GenerationRequest) -> bool:
    """True if hypotheses at the length limit end with a forced EOS, as `beam_search` decides."""
    return request.options.stop_rule == "beam_full" and request.forced_eos_id is None


class _Recorder:
    """Makes the nodes of a tree from the steps of a beam search with one sentence."""

    def __init__(self, model: Generator, request: GenerationRequest) -> None:
        self.nodes: list[Node] = []
        self.stop = Stop("length")
        self._tokenizer = model.tgt_tokenizer if model.has_tokenizer else None
        self._request = request
        self._forces_eos = _forces_eos(request)
        self._beam: list[int] = []  # node of each hypothesis in the beam

    def observe(
        self, beams: Beams, log_probs: Float[Tensor, "N V"], choice: StepChoice, after: Beams
    ) -> None:
        """Add the nodes of a step, see `heedful.generation.beam.Observer`."""
        if not bool(beams.is_open[0]):
            return
        width = beams.log_prob.size(1)
        parents = self._beam or [-1] * width
        limit = self._request.max_new_tokens[0]
        is_last = after.length == limit
        in_beam: set[tuple[int, int]] = set()
        beam: list[int] = []
        columns = [values[0].tolist() for values in choice.open]
        for parent, token, value, total in zip(*columns, strict=True):
            is_real = total > -math.inf
            if is_real:
                in_beam.add((parent, token))
                fate: Fate = "cut" if is_last else "kept"
                self._add(parents[parent], after.length, token, value, total, fate)
            beam.append(len(self.nodes) - 1 if is_real else (beam or [0])[0])
        # A step has `width` open entries, then its endings.
        first_ref = beams.length * (width + choice.endings.token.size(1)) + width
        finished = set(after.finished.ref[0].tolist())
        columns = [values[0].tolist() for values in choice.endings]
        for index, (parent, token, value, total) in enumerate(zip(*columns, strict=True)):
            if total > -math.inf and first_ref + index in finished:
                in_beam.add((parent, token))
                fate = "cut" if is_last and self._forces_eos else "finished"
                self._add(parents[parent], after.length, token, value, total, fate)
        self._add_pruned(beams, log_probs, in_beam, parents)
        self._beam = beam
        if not bool(after.is_open[0]):
            self.stop = self._stop(after, is_last=is_last)

    def path(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The nodes of an output."""
        children = {
            (node.parent, node.id): index
            for index, node in reversed([*enumerate(self.nodes)])
            if node.fate != "pruned"
        }
        path: list[int] = []
        for token in ids:
            path.append(children[(path[-1] if path else -1, token)])
        return tuple(path)

    def _add(
        self, parent: int, step: int, token: int, value: float, total: float, fate: Fate
    ) -> None:
        [name] = pieces(self._tokenizer, [token])
        score = float(self._request.score(total, step))
        self.nodes.append(Node(parent, step, token, name, value, total, score, fate))

    def _add_pruned(
        self,
        beams: Beams,
        log_probs: Float[Tensor, "N V"],
        in_beam: set[tuple[int, int]],
        parents: list[int],
    ) -> None:
        """Add the best candidates outside the beam, up to the beam size."""
        width, size = beams.log_prob.size(1), log_probs.size(1)
        rows = log_probs.expand(width, -1) if len(log_probs) == 1 else log_probs
        totals = (beams.log_prob[0][:, None] + rows.double()).flatten()
        best = totals.topk(min(len(totals), width + len(in_beam)))
        count = 0
        for index, total in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            parent, token = divmod(index, size)
            if (parent, token) in in_beam or total == -math.inf or count == width:
                continue
            count += 1
            value = float(rows[parent, token])
            self._add(parents[parent], beams.length + 1, token, value, total, "pruned")

    def _stop(self, after: Beams, *, is_last: bool) -> Stop:
        """Why the search ended after its last step."""
        options, score = self._request.options, self._request.score
        limit = self._request.max_new_tokens[0]
        if is_last:
            return Stop("length", (limit,))
        best_open = float(after.log_prob[0].max())
        if best_open == -math.inf:
            return Stop("dead_end")
        rule, worst = options.stop_rule or "optimal", float(after.finished.score[0, -1])
        if rule == "beam_full":
            return Stop(rule, (options.beam_size or 1,))
        if rule == "heuristic":
            return Stop(rule, (float(score(best_open, after.length)), worst))
        lengths = (max(options.min_new_tokens or 0, after.length + 1), limit)
        return Stop(rule, (max(float(score(best_open, length)) for length in lengths), worst))


def _first_rule(steps: dict[int, list[tuple[str, Tensor]]]) -> Rule:
    """A rule that changes nothing, and records the distribution before any rule."""

    def record(log_probs: Tensor, context: Context) -> Tensor:
        model = context.model_log_probs
        model = log_probs if model is None else model
        stages = [("model", model[0].clone())]
        if not torch.equal(model, log_probs):
            stages.append(("min_new_tokens", log_probs[0].clone()))
        steps[context.length] = stages
        return log_probs

    return record


def _recorded(rule: Rule, steps: dict[int, list[tuple[str, Tensor]]]) -> Rule:
    """A rule that also records its result."""

    def apply(log_probs: Tensor, context: Context) -> Tensor:
        changed = rule(log_probs, context)
        steps[context.length].append((_name(rule), changed[0].clone()))
        return changed

    return apply


def _name(rule: Callable[..., Any]) -> str:
    """The name of a rule: that of its option, with its number."""
    option = getattr(rule, "option", None)
    if option is not None:
        return f"{option} {getattr(rule, 'value', '')}".strip()
    return type(rule).__name__
