"""One text as the net of a model reads it: ids and tokens of each side, and forward passes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.backends.torch.cached_net import checked_start_ids
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, describe
from heedful.fidelity.masking import mask_pair
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.heads import ClassificationHead
from heedful.parts.tokens import Tokens
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier, Encoder, MaskedLanguageModel
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.requests import options_for_ids
from heedful.pipelines.translation import Translator

Side = Literal["source", "target", "text"]
Text = str | Sequence[int]


@dataclass(frozen=True)
class Reading:
    """One input of a model: a source and a target, or a text.

    Attributes:
        ids: by side, the ids that the net reads. A target begins with the decoder's start ids and
            lacks its last token, which the net only predicts.
        tokens: by side, the pieces of these ids as text.
        outputs: for each position of the last side, the id that the text has there as output: the
            next token, or for a masked language model the token itself; None: not known (after the
            last token, at a mask). Empty for classifiers and embedders.
    """

    model: SavedModel
    ids: Mapping[Side, tuple[int, ...]]
    tokens: Mapping[Side, tuple[str, ...]]
    outputs: tuple[int | None, ...]

    @property
    def net(self) -> Any:
        """The torch module."""
        return self.model.net

    @property
    def is_regression(self) -> bool:
        """True if the logits are values (`Classifier.classify`)."""
        model = self.model
        return isinstance(model, Classifier) and model.metadata.problem == "regression"

    @property
    def output_side(self) -> Side:
        """The side at whose positions the outputs are."""
        return [*self.ids][-1]

    @property
    def output_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the output vocabulary; None without tokenizers."""
        return self.model.tgt_tokenizer if self.model.has_tokenizer else None

    def stack_side(self, stack: str) -> Side:
        """The side that a stack (`encoder` or `decoder`) reads."""
        return ("source" if stack == "encoder" else "target") if len(self.ids) == 2 else "text"

    def output_names(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Names of outputs: pieces of the vocabulary, or labels of the classes."""
        if isinstance(self.model, Classifier):
            return tuple(self.model.labels[index] for index in ids)
        return pieces(self.output_tokenizer, ids)

    def output_tokens(self) -> tuple[str | None, ...]:
        """The pieces of `outputs`."""
        return tuple(
            None if token is None else self.output_names([token])[0] for token in self.outputs
        )

    def batch(self, side: Side, rows: int = 1) -> Tokens:
        """The tokens of a side, repeated in `rows` rows."""
        ids = torch.tensor([self.ids[side]], device=self.model.device)
        return Tokens.from_ids(ids.expand(rows, -1))

    def embedding(self, side: Side) -> TokenEmbedding:
        """The module that embeds a side."""
        name = {"source": "src_embedding", "target": "tgt_embedding", "text": "embedding"}[side]
        embedding: TokenEmbedding = getattr(self.net, name)
        return embedding

    def vectors(self, side: Side) -> Float[Tensor, "T D"]:
        """Rows of the embedding matrix of a side's tokens."""
        vectors: Tensor = self.embedding(side).tokens(self.batch(side).ids)[0]
        return vectors

    def embed(
        self, side: Side, vectors: Float[Tensor, "N T D"] | None = None
    ) -> Float[Tensor, "N T D"]:
        """The input of a side's first block.

        Args:
            vectors: in place of the rows of the embedding matrix: positions, token types and norm
                are applied to them.
        """
        embedding = self.embedding(side)
        if vectors is None:
            return embedding(self.batch(side))
        handle = embedding.tokens.register_forward_hook(lambda module, inputs, output: vectors)
        try:
            return embedding(self.batch(side, len(vectors)))
        finally:
            handle.remove()

    def logits(
        self,
        embedded: Mapping[Side, Float[Tensor, "N T D"]] | None = None,
        position: int | None = None,
    ) -> Float[Tensor, "N P V"]:
        """Logits at each position; of a classifier (N, 1, C).

        Args:
            embedded: the input of each stack by side (`embed`); None: that of the text.
            position: compute the logits of this position only; P is 1.

        Raises:
            UserError: a model without an output head.
        """
        if self.net.head is None:
            raise UserError(
                "this model has no output head, only states: its attention and embeddings can be "
                "inspected, but no predictions"
            )
        states = self.states(embedded)
        return self.head_logits(states if position is None else states[:, position : position + 1])

    def states(
        self, embedded: Mapping[Side, Float[Tensor, "N T D"]] | None = None
    ) -> Float[Tensor, "N T D"]:
        """States of the last stack after its final norm; arguments as in `logits`."""
        net, inputs = self.net, embedded or {side: self.embed(side) for side in self.ids}
        rows = len(inputs[self.output_side])
        last = inputs[self.output_side], self.batch(self.output_side, rows)
        states: Tensor
        if isinstance(net, EncoderDecoder):
            source = self.batch("source", rows)
            memory = net.encoder(inputs["source"].expand(rows, -1, -1), source)
            states = net.decoder(*last, causal=True, memory=memory, source=source)
        elif isinstance(net, DecoderOnly):
            states = net.decoder(*last, causal=True)
        else:
            states = net.encoder(*last)
        return states

    def log_probs(self, logits: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        """Log-probabilities of the outputs; of a multi-label classifier each class has its own.

        Raises:
            UserError: a regression.
        """
        if self.is_regression:
            raise UserError(
                "the outputs of a regression are values, not probabilities; attributions explain "
                "them"
            )
        if isinstance(self.model, Classifier) and self.model.metadata.problem == "multi_label":
            return F.logsigmoid(logits)
        return logits.log_softmax(-1)

    def head_logits(self, states: Float[Tensor, "N T D"]) -> Float[Tensor, "N P V"]:
        """Logits of states after the final norm; a classifier reads the first position only."""
        head = self.net.head
        if isinstance(head, ClassificationHead):
            states = states[:, :1]
        logits: Tensor = head(states)
        return logits


def read(model: SavedModel, text: Text, target: Text | None = None, **options: Any) -> Reading:
    """Encode a text for a model, as its other calls do.

    Args:
        text: a source, prompt or text; or its ids.
        target: of an encoder-decoder; None: the output of `model`.
        options: of the output (`heedful.options.Options`), such as `beam_size` and `tgt_language`.

    Raises:
        UserError: a target for a model of one stack; an empty text; a text that is too long; a
            model without a net (an ensemble) or without a tokenizer.
    """
    if not model.has_net:
        raise UserError("an ensemble has no net of its own to inspect; give one of its models")
    if isinstance(model, Translator):
        return _read_pair(model, text, target, options)
    if target is not None:
        raise UserError(
            f"a target is for encoder-decoders, but this model is a {model.kind}: it has one "
            "stack, so append the target to the text, or leave it out"
        )
    if options and not isinstance(model, LanguageModel):
        raise UserError(f"{next(iter(options))} is for models that generate text; leave it out")
    ids = _text_ids(model, text, options)
    outputs: tuple[int | None, ...] = ()
    if isinstance(model, LanguageModel):
        outputs = (*ids[1:], None)
    elif isinstance(model, MaskedLanguageModel):
        outputs = tuple(None if token == _mask_id(model) else token for token in ids)
    tokenizer = model.src_tokenizer if model.has_tokenizer else None
    return Reading(model, {"text": tuple(ids)}, {"text": pieces(tokenizer, ids)}, outputs)


def _text_ids(model: SavedModel, text: Text, options: dict[str, Any]) -> list[int]:
    rows: Any = [text]
    if isinstance(model, LanguageModel):
        rows = model.prompt_ids(rows, model.options(**options))
    elif isinstance(model, MaskedLanguageModel) and _mask_id(model) is not None:
        rows = [model.ids_with_masks(text)] if isinstance(text, str) else rows
    elif isinstance(model, Encoder):
        rows, _ = model.encode_pairs(rows, None, "error")
    model.check_lengths(rows, "text", "error")
    [ids] = rows
    if not ids:
        raise UserError("the text is empty; give at least one token")
    return [*ids]


def _mask_id(model: SavedModel) -> int | None:
    return model.tokenizer.specials.mask_id if model.has_tokenizer else None


def _read_pair(
    model: Translator, text: Text, target: Text | None, options: dict[str, Any]
) -> Reading:
    keep = model.metadata.keep if options.get("keep", True) else None
    if keep is not None and isinstance(text, str) and isinstance(target, str):
        text, target = mask_pair(text, target, keep.patterns)  # as in training
        options = {**options, "keep": False}
    [src] = model.prompt_ids([text], model.options(**options))  # type: ignore[arg-type]
    if not src:
        raise UserError("the text is empty, and the translation of an empty text is empty")
    start = checked_start_ids(model.ids.decoder_start_ids)
    if target is None:
        others = options_for_ids(model, options)
        [output] = model.generate([src], return_details=True, **{**others, "num_return": 1})
        tgt = output[0].ids
    elif isinstance(target, str):
        tgt = model.target_ids(target, model.options(**options))
    else:
        tgt = [*target]
        model.check_ids([tgt], "tgt_")
    longest = model.config.max_length + 1 - len(start)
    model.check_lengths([tgt], "target", "error", longest=longest)
    ids = (*start, *tgt[:-1])
    sides = {"source": tuple(src), "target": ids}
    tokenizers = (model.src_tokenizer, model.tgt_tokenizer) if model.has_tokenizer else (None, None)
    tokens = {
        side: pieces(tokenizer, row)
        for (side, row), tokenizer in zip(sides.items(), tokenizers, strict=True)
    }
    unknown: list[int | None] = [None] * (len(start) - 1)
    outputs = (*unknown, *tgt) if tgt else (*unknown, None)
    return Reading(model, sides, tokens, outputs)  # type: ignore[arg-type]


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> tuple[str, ...]:
    """The pieces of ids as text; their numbers without a tokenizer."""
    return tuple(map(str, ids) if tokenizer is None else tokenizer.tokens(ids))


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The net in evaluation mode and without gradients; afterwards it is in its mode before."""
    was_training = net.training
    net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        net.train(was_training)


def check_index(name: str, index: int, count: int) -> int:
    """An index from 0, or from -1 downwards from the end; raises UserError outside of the range."""
    if not isinstance(index, int) or not -count <= index < count:
        raise UserError(f"there are {name}s 0 to {count - 1}, not {describe(index)}")
    return index % count
