"""The base of all searches: log-probabilities under the rules of a request, and the batch.

`SearchRequest.end_reason` decides where an output ends, `outputs.StopStrings` by strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.request import (
    NextLogProbs,
    SearchRequest,
    State,
    check_largest,
)
from heedful.generation.rules import KEEP_BANS, apply_rules
from heedful.generation.token_rules import Context, ForcedTokens

_NO_POSITIVE = (
    "the stop rule optimal has no bound for values above 0, so use no negative penalty and no bias "
    "above 0, or another stop_rule"
)


@dataclass
class RequestRules:
    """The rules of a request, applied to next-token log-probabilities, and checks of both.

    Attributes:
        source: the name of the model in errors.
        can_overwrite: rules may write to the model's tensors.
    """

    request: SearchRequest
    source: str = "next_log_probs"
    can_overwrite: bool = False
    memory: dict[object, Tensor] = field(default_factory=dict, init=False)  # see `Context`
    _rows: tuple[list[int], Tensor] | None = field(default=None, init=False)
    _forced: list[ForcedTokens] = field(init=False)
    _can_write: bool = field(init=False)  # where no token is forced

    def __post_init__(self) -> None:
        rules = self.request.rules
        self._forced = [rule for rule in rules if isinstance(rule, ForcedTokens)]
        # A forced token gets the model's value, and a rule of the caller may read values, which
        # rules that write to the model's tensor would have destroyed.
        others_keep_bans = all(isinstance(rule, (ForcedTokens, *KEEP_BANS)) for rule in rules)
        self._can_write = self.can_overwrite and others_keep_bans

    def __call__(
        self,
        model_log_probs: Float[Tensor, "N V"],
        generated: Int[Tensor, "N t"],
        sentences: list[int],
        is_open: Sequence[bool] | None = None,
    ) -> Float[Tensor, "N V"]:
        """The log-probabilities under all rules.

        Args:
            model_log_probs: log-probabilities before any rule.
            generated: the new tokens of each row.
            sentences: indices of the sentences; each has equally many rows, which are adjacent.
            is_open: False for rows that have ended; None: all are open.
        """
        if self.request.largest_id >= model_log_probs.shape[1]:
            raise UserError(
                f"token id {self.request.largest_id} (prompt, EOS or forced) is outside the "
                f"vocabulary: {self.source} gives {model_log_probs.shape[1]} log-probabilities"
            )
        rules = self.request.rules
        if not rules:
            return model_log_probs
        length = generated.size(1)
        in_place = self._can_write and not any(rule.forces(length) for rule in self._forced)
        context = Context(
            self.request.prompts,
            generated,
            self._sentence_of_rows(sentences, generated),
            self.memory,
            model_log_probs,
            is_open,
            in_place=in_place,
            sources=self.request.sources,
            eos_ids=self.request.eos_ids,
        )
        return apply_rules(rules, model_log_probs, context)

    def _sentence_of_rows(
        self, sentences: list[int], generated: Int[Tensor, "N t"]
    ) -> Int[Tensor, "N"]:
        """The sentence of each row; computed again only when the rows have changed."""
        num_rows = generated.size(0)
        if self._rows is None or self._rows[0] != sentences or self._rows[1].numel() != num_rows:
            copies = num_rows // len(sentences)
            sentence = torch.tensor(sentences, device=generated.device)
            self._rows = sentences, sentence.repeat_interleave(copies)
        return self._rows[1]

    @property
    def checks_model(self) -> bool:
        """True if the model's values are checked as well as those under the rules.

        They cannot be if the rules overwrite them, and need not be if there are no rules.
        """
        return bool(self.request.rules) and not self.can_overwrite

    def check_not_nan(self, of_model: float, under_rules: float, step: int) -> None:
        """Like `check_rankable`, but rules may raise values above 0."""
        if self.checks_model or not self.request.rules:
            check_largest(of_model, step, self.source)
        if under_rules != under_rules:
            raise UserError(f"{self._rule_source} gave NaN at step {step}")

    def check_rankable(self, of_model: float, under_rules: float, step: int) -> None:
        """Raise UserError for log-probabilities of which the best score has no bound: NaN, above 0.

        Args:
            of_model: the largest before the rules; read only if `checks_model`.
            under_rules: the largest under the rules.
        """
        if self.checks_model:
            check_largest(of_model, step, self.source)
        if self.request.rules:
            check_largest(under_rules, step, self._rule_source, _NO_POSITIVE)
        else:
            check_largest(under_rules, step, self.source)

    @property
    def _rule_source(self) -> str:
        return f"{self.source} or a rule" if self.can_overwrite else "a rule"


@dataclass
class Search:
    """Base of the batched searches: a next-token function, its state, and the sentences to decode.

    Every search chooses from the log-probabilities of `next_step`, or from logits `under_rules`.

    Attributes:
        sentences: indices of the sentences in the batch, without those that have left it.
    """

    next_log_probs: NextLogProbs
    state: State | None
    request: SearchRequest
    sentences: list[int] = field(init=False)
    rules: RequestRules = field(init=False)

    def __post_init__(self) -> None:
        self.sentences = list(range(self.request.batch))
        self.rules = RequestRules(self.request, can_overwrite=self.state is not None)

    def next_step(
        self, tokens: Int[Tensor, "N all"], length: int, is_open: Sequence[bool] | None = None
    ) -> tuple[Float[Tensor, "N V"], Float[Tensor, "N V"]]:
        """The log-probabilities after each row: the model's, and those under all rules.

        Args:
            tokens: rows of start and new tokens; the rows of each sentence are adjacent.
            length: the number of new tokens.
            is_open: see `RequestRules`.
        """
        arguments = (tokens,) if self.state is None else (tokens, self.state)
        model_log_probs: Tensor = self.next_log_probs(*arguments)
        check_shape(model_log_probs, tokens.size(0))
        return model_log_probs, self.under_rules(model_log_probs, tokens, length, is_open)

    def under_rules(
        self,
        values: Float[Tensor, "N V"],
        tokens: Int[Tensor, "N all"],
        length: int,
        is_open: Sequence[bool] | None = None,
    ) -> Float[Tensor, "N V"]:
        """The model's values after each row under all rules; arguments as in `next_step`."""
        if not self.request.rules and length > 0:
            return values  # whose width the first step has checked
        generated = tokens[:, tokens.shape[1] - length :]
        return self.rules(values, generated, self.sentences, is_open)

    def drop_done(self, is_open: Sequence[bool], at_once: bool = False) -> list[int] | None:
        """Remove sentences that are done, and their rows of the state.

        Returns the indices, in the batch, of the sentences that stay, from which the caller selects
        its tensors; or None, and nothing is removed, while less than an eighth is done: removing
        sentences copies the state of the others.

        Args:
            at_once: do not wait for an eighth.
        """
        num_done = len(is_open) - sum(is_open)
        if num_done < (1 if at_once else max(1, len(is_open) // 8)):
            return None
        keep = [index for index, open_ in enumerate(is_open) if open_]
        self.sentences = [self.sentences[index] for index in keep]
        if self.state is not None and keep:
            device = self.request.start.device
            self.state.select(torch.tensor(keep, dtype=torch.long, device=device))
        return keep


def check_shape(
    log_probs: Tensor, num_rows: int, source: str = "next_log_probs", rows: str = "prefixes"
) -> None:
    """Raise UserError unless there is one row of log-probabilities for each prefix."""
    if log_probs.ndim != 2 or log_probs.size(0) != num_rows:
        raise UserError(
            f"{source} gave shape {tuple(log_probs.shape)} for {num_rows} {rows}: "
            f"it must give ({num_rows}, vocabulary size)"
        )
