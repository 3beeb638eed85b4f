"""Language models opened for use: going on with a text, and how likely a text is."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.data.collate import collate_windows
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import plan_evaluation
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss, total
from heedful.inference.decoding import STEPS_AT_FIRST, Decoding, capacity_for, left_padded
from heedful.inference.generator import Generator, TextScore
from heedful.inference.model import Texts
from heedful.options import Options
from heedful.parts.losses import LossSum
from heedful.parts.tokens import Tokens

_NEW_TOKENS = 64


class LanguageModel(Generator):
    """A net of one stack, `net(ids, lengths) -> logits`, that goes on with a text."""

    kind = "language model"

    def prompt_ids(self, prompts: Texts, options: Options | None = None) -> list[list[int]]:
        """Ids of each prompt, behind the mark that begins a text where the model has one."""
        # A model without a mark of its own was trained on texts apart by their end.
        rows = self.rows_of(
            prompts, lambda tokenizer, ids: [*tokenizer.prefix_ids, *ids] or [self.end_ids()[0]]
        )
        if [] in rows:
            raise UserError(f"prompt {rows.index([]) + 1} is empty: give it at least one token")
        return rows

    def length_limit(self, row: list[int], options: Options) -> int:
        """As asked for; a text may outgrow the net (`Decoding`)."""
        return options.max_new_tokens or _NEW_TOKENS

    def open(self, rows: list[list[int]], capacity: int, beams: int) -> tuple[Tensor, Decoding]:
        start, padding = left_padded(rows, self.device)
        size = capacity_for(start.size(1) + beams * min(capacity, STEPS_AT_FIRST))
        cache = self.net.start(len(rows), capacity=size, beams=beams)
        longest = self.config.max_length
        return start, Decoding(self.net, cache, longest=longest, left_padding=padding)

    def score(self, texts: Texts, *, stride: int | None = None) -> list[TextScore]:
        """Log-probability of each text, each token told from those before it.

        The first one counts only where the model has a mark before it.

        `stride`: how far windows over a text longer than the net are apart; default: half the
        net's length.
        """
        rows = self.prompt_ids(texts)
        context = self.config.max_length
        scores = []
        with torch.inference_mode():
            for row in rows:
                if len(row) < 2:
                    scores.append(TextScore(0.0, 0))
                    continue
                text = pack_ids([row], self.config.vocab_size)
                found = self.window_sums(text, context=context, stride=stride or context // 2 or 1)
                scores.append(TextScore(-float(found.nll), found.tokens))
        return scores

    @torch.inference_mode()
    def window_sums(
        self, texts: Sequences, *, context: int, stride: int, batch_size: int = 32
    ) -> LossSum:
        """Loss and correct tokens over all of some texts, by windows that overlap."""
        self.net.eval()
        plan = plan_evaluation(texts.lengths, context=context, stride=stride, batch_size=batch_size)
        batches = (collate_windows(texts, item, isolate=False, pad_id=0) for item in plan)
        moved = (batch.to(self.device) for batch in batches)
        return total([batch_loss(self.net, batch, count_correct=True) for batch in moved])

    def batches(self, rows: Sequence[Sequence[int]], options: Options) -> Iterator[list[int]]:
        """Prompts that fit with what is written behind them; others with those equally long."""
        new = options.max_new_tokens or _NEW_TOKENS
        fitting = [row if len(row) + new <= self.config.max_length else [] for row in rows]
        # By the memory that they will need.
        sizes = [range(len(row) + new) if row else () for row in fitting]
        yield from super().batches(sizes, options)
        by_size: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            if not fitting[number]:
                by_size.setdefault(len(row), []).append(number)
        count = max(1, options.row_tokens // self.config.max_length)
        for numbers in by_size.values():
            yield from (numbers[place : place + count] for place in range(0, len(numbers), count))

    def states(self, ids: Tensor, lengths: Tensor) -> Float[Tensor, "B T D"]:
        states: Tensor = self.net.decode(Tokens.of(ids, lengths))
        return states
