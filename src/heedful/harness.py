"""heedful's language models in lm-evaluation-harness (Gao et al.), as the model type `heedful`.

In Python: `lm_eval.simple_evaluate(HeedfulLM("runs/novel"), tasks=["lambada_openai"])`. As a
program: `python -m heedful.harness run --model heedful --model_args path=runs/novel --tasks ...`,
with the arguments of `lm_eval`.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heedful import extras
from heedful.backends.torch.cached_net import right_padded
from heedful.errors import UserError
from heedful.pipelines import LanguageModel, load
from heedful.pipelines.batching import by_length
from heedful.progress import track

extras.require("harness", "heedful.harness")
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.utils import normalize_gen_kwargs  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

Window = tuple[Any, list[int], list[int]]  # texts or None, ids of the context, of the continuation
_log = logging.getLogger("heedful.harness")
_NEW_TOKENS = 256  # the harness's default
_READ = {"do_sample", "temperature", "until", "max_gen_toks"}
_SAMPLING = ("top_k", "top_p", "min_p", "typical_p")


@register_model("heedful")
class HeedfulLM(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A language model for the tasks of the harness; results equal those of its adapter `hf`.

    Args:
        path: a model directory, or an open model.
        batch_tokens: padded tokens of a batch.
        device: as in `heedful.load`; one of CUDA, the default of the harness, is `auto` without it.
        batch_size, max_batch_size: accepted from the harness; `batch_tokens` bounds a batch.

    Raises:
        UserError: not a language model with a tokenizer.
    """

    def __init__(
        self,
        path: str | Path | LanguageModel,
        *,
        batch_tokens: int | str = 4096,
        device: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        device = device or "auto"
        if device.startswith("cuda") and not torch.cuda.is_available():
            _log.warning("%s is not available; the model runs on the device auto", device)
            device = "auto"
        model = path if not isinstance(path, str | Path) else load(path, device=device)
        if not isinstance(model, LanguageModel) or not model.has_tokenizer:
            raise UserError("the harness needs a language model (decoder-only) with a tokenizer")
        self.model, self.batch_tokens = model, int(batch_tokens)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.model.end_ids()[0]

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one: BOS, or EOS without it."""
        bos_id = self.model.tokenizer.specials.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text, after the tokenizer's prefix unless the text has it already."""
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode(string)
        first = tokenizer.decode([self.prefix_token_id], keep_specials=True)
        if add_special_tokens is False or (add_special_tokens is None and string.startswith(first)):
            return ids
        return tokenizer.add_special_tokens(ids)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows that begin with a single known token."""
        windows: list[Window] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.config.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += log_prob
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Window], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and True if greedy decoding would generate it.

        A row that is too long loses tokens at its start.
        """
        longest = self.model.config.max_length + 1  # the last token is only predicted
        rows = [(context + continuation)[-longest:] for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        with track("harness", len(rows)) as advance:
            for batch in by_length([row[:-1] for row in rows], self.batch_tokens):
                inputs = right_padded([rows[i][:-1] for i in batch], self.model.device)
                logits = self.model.net(*inputs)
                for i, row_logits in zip(batch, logits, strict=True):
                    targets = requests[i][2][-(len(rows[i]) - 1) :]
                    end = len(rows[i]) - 1
                    scores = row_logits[end - len(targets) : end].float().log_softmax(-1)
                    ids = torch.tensor(targets, device=scores.device)
                    log_prob = scores.gather(1, ids[:, None]).sum().item()
                    results[i] = log_prob, bool((scores.argmax(-1) == ids).all())
                advance(len(batch))
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text; contexts that are too long lose their start."""
        outputs = []
        with track("harness", len(requests)) as advance:
            for (context, settings), batch in _by_arguments(requests):
                given = normalize_gen_kwargs(dict(settings), _NEW_TOKENS)
                new = min(given["max_gen_toks"], self.model.config.max_length - 1)
                room = self.model.config.max_length - new
                until = [text for text in given["until"] if text]
                rows = [self.tok_encode(context)[-room:] for context in batch]
                generations = self.model.generate(
                    rows, return_details=True, max_new_tokens=new, stop=until, **_sampling(given)
                )
                outputs += [candidates[0].text for candidates in generations]
                advance(len(batch))
        return outputs


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of sampling among the arguments of a request; warns of those that are ignored."""
    if others := sorted(given.keys() - _READ - {*_SAMPLING}):
        _log.warning("ignored in generation_kwargs: %s", ", ".join(others))
    if not given["do_sample"]:
        return {"temperature": 0}  # greedy, also where the model's own default is to sample
    limits = {name: given[name] for name in _SAMPLING if given.get(name)}  # 0 is none
    return {"temperature": given["temperature"], **limits}


def _by_arguments(requests: Any) -> Any:
    """Runs of successive requests with equal arguments, as the first one and the contexts."""
    batch: list[str] = []
    first: Any = None
    for request in requests:
        if batch and request.args[1] != first[1]:
            yield first, batch
            batch = []
        if not batch:
            first = request.args
        batch.append(request.args[0])
    if batch:
        yield first, batch


def main() -> None:
    """The program of the harness, with heedful's models; an error of the user is one line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
