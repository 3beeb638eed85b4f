"""The decoding step shared by all searches, and the sentences of a batch that are still decoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.context import Context
from heedful.generation.request import SearchRequest
from heedful.generation.rules import apply_rules, keep_forbidden
from heedful.generation.state import NextLogProbs, State, check_largest, sentences_to_keep

_NO_NEGATIVE = "a beam search cannot rank values above 0, so take no negative penalty"


@dataclass
class DecodingStep:
    """Checks next-token log-probabilities and applies the rules of a request to them.

    Attributes:
        source: what gives the log-probabilities, for errors.
        can_overwrite: nobody else uses the given tensors, so rules may write to them.
    """

    request: SearchRequest
    source: str = "next_log_probs"
    can_overwrite: bool = False
    memory: dict[object, Tensor] = field(default_factory=dict, init=False)
    _rows: tuple[list[int], Tensor] | None = field(default=None, init=False)  # of the last step

    def __call__(
        self,
        given: Float[Tensor, "N V"],
        generated: Int[Tensor, "N t"],
        sentences: list[int],
        is_open: Sequence[bool] | None = None,
    ) -> Float[Tensor, "N V"]:
        """The log-probabilities under all rules.

        Args:
            given: log-probabilities before any rule.
            generated: the new tokens of each row.
            sentences: those of the batch; each has equally many rows, which are adjacent.
            is_open: which rows have not ended; None: all.
        """
        if self.request.largest_id >= given.shape[1]:
            raise UserError(
                f"token id {self.request.largest_id} (prompt, EOS or forced) is outside the "
                f"vocabulary: {self.source} gives {given.shape[1]} log-probabilities"
            )
        rules = self.request.rules
        if not rules:
            return given
        sentence = self._sentence_of_rows(sentences, generated)
        in_place = self.can_overwrite and keep_forbidden(rules, generated.shape[1])
        context = Context(
            self.request.prompts, generated, sentence, self.memory, given, is_open, in_place
        )
        return apply_rules(rules, given, context)

    def _sentence_of_rows(
        self, sentences: list[int], generated: Int[Tensor, "N t"]
    ) -> Int[Tensor, "N"]:
        """The sentence of each row, formed again only where rows have come or gone."""
        if self._rows is None or self._rows[0] != sentences or len(self._rows[1]) != len(generated):
            copies = len(generated) // len(sentences)
            sentence = torch.tensor(sentences, device=generated.device)
            self._rows = sentences, sentence.repeat_interleave(copies)
        return self._rows[1]

    @property
    def checks_given(self) -> bool:
        """Whether given values are checked apart from ruled ones: not where rules overwrite."""
        return bool(self.request.rules) and not self.can_overwrite

    def check_not_nan(self, given: float, ruled: float, step: int) -> None:
        """As `check_rankable`, but values under the rules may be above 0."""
        if self.checks_given or not self.request.rules:
            check_largest(given, step, self.source)
        if ruled != ruled:
            raise UserError(f"{self._ruled_source} gave NaN at step {step}")

    def check_rankable(self, given: float, ruled: float, step: int) -> None:
        """Refuse log-probabilities that a beam search cannot rank: NaN, or above 0.

        Args:
            given: the largest before the rules, used only where `checks_given`.
            ruled: the largest under the rules.
        """
        if self.checks_given:
            check_largest(given, step, self.source)
        if self.request.rules:
            check_largest(ruled, step, self._ruled_source, _NO_NEGATIVE)
        else:
            check_largest(ruled, step, self.source)

    @property
    def _ruled_source(self) -> str:
        return f"{self.source} or a rule" if self.can_overwrite else "a rule"


@dataclass
class Search:
    """A next-token function, its state, and the sentences of a request that are not done.

    Every batched search is a way to choose from the log-probabilities of `next_step`.
    """

    next_log_probs: NextLogProbs
    state: State | None
    request: SearchRequest
    sentences: list[int] = field(init=False)
    step: DecodingStep = field(init=False)

    def __post_init__(self) -> None:
        self.sentences = list(range(self.request.batch))
        self.step = DecodingStep(self.request, can_overwrite=self.state is not None)

    def next_step(
        self, tokens: Int[Tensor, "N all"], length: int, is_open: Sequence[bool] | None = None
    ) -> tuple[Float[Tensor, "N V"], Float[Tensor, "N V"]]:
        """The log-probabilities after each row, given and under all rules.

        The rows of each sentence are adjacent; `length` of their tokens are new.
        """
        arguments = (tokens,) if self.state is None else (tokens, self.state)
        given: Tensor = self.next_log_probs(*arguments)
        check_shape(given, len(tokens))
        generated = tokens[:, tokens.shape[1] - length :]
        return given, self.step(given, generated, self.sentences, is_open)

    def drop_done(self, is_open: Sequence[bool], at_once: bool = False) -> list[int] | None:
        """Drop sentences that are done, where enough are: the places of those kept, else None.

        The state follows; tensors with a row for each sentence are the caller's to select from.
        """
        keep = sentences_to_keep(is_open, at_once)
        if keep is not None:
            self.sentences = [self.sentences[place] for place in keep]
            if self.state is not None and keep:
                device = self.request.start.device
                self.state.select(torch.tensor(keep, dtype=torch.long, device=device))
        return keep


def check_shape(
    given: Tensor, num_rows: int, source: str = "next_log_probs", rows: str = "prefixes"
) -> None:
    """Refuse what is not one row of log-probabilities for each prefix."""
    if given.ndim != 2 or len(given) != num_rows:
        raise UserError(
            f"{source} gave shape {tuple(given.shape)} for {num_rows} {rows}: "
            f"it must give ({num_rows}, vocabulary size)"
        )
