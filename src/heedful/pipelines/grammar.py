"""Outputs that match a JSON schema or a regular expression, by the library llguidance."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from heedful import extras
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_text
from heedful.options import Options

_MATCHERS = 4096  # states of prefixes in memory; others are computed again
# The spelling of Python's json.dumps; a model could otherwise write spaces without end.
_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A prefix function (`Options.prefix_function`) that allows the tokens of a grammar.

    An end token is allowed where the text is complete, and only an end token where it cannot be
    continued. An output that the length limit cuts off may be incomplete. The text is that of the
    new tokens; a first space, which decoding leaves out with some tokenizers, counts.

    Args:
        eos_ids: ids that end an output.
        vocab_size: ids of the net; those without a token are never allowed.

    Raises:
        UserError: llguidance is not installed; a schema or expression that it does not accept; a
            tokenizer whose tokens have no fixed text.
    """

    def __init__(
        self, options: Options, tokenizer: Tokenizer, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        name = "regex" if options.json_schema is None else "json_schema"
        extras.require("grammar", name)
        from llguidance import LLMatcher

        self._eos_ids = [*eos_ids]
        self._vocabulary, self._tokenizer = _library_tokenizer(tokenizer, vocab_size, eos_ids[0])
        try:
            if options.regex is not None:
                grammar = LLMatcher.grammar_from_regex(options.regex)
            else:
                assert options.json_schema is not None
                schema = json.dumps(_schema(options.json_schema))
                grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON)
            problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise UserError(f"{name}: {problem.strip().splitlines()[0]}")
        start = LLMatcher(self._tokenizer, grammar, log_level=0)
        self._matchers: OrderedDict[tuple[int, ...], Any] = OrderedDict([((), start)])
        self._start = start

    def __call__(self, number: int, ids: Sequence[int]) -> Sequence[int]:
        """The ids that are allowed after the new tokens `ids`."""
        matcher = self._matcher(tuple(ids))
        if matcher.is_stopped() and not matcher.is_error():
            return self._eos_ids
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        is_end = np.isin(allowed, self._eos_ids)
        result = [*allowed[~is_end].tolist(), *(self._eos_ids if matcher.is_accepting() else [])]
        if not ids and not result:  # of any text
            raise UserError("no token of the model's vocabulary begins as the grammar requires")
        return [] if matcher.is_error() else result  # none: the output ends there

    def _matcher(self, ids: tuple[int, ...]) -> Any:
        """The state after some tokens, from the state one token before where it is in memory."""
        if ids in self._matchers:
            return self._matchers[ids]
        before = self._matchers.get(ids[:-1])
        matcher = (before or self._start).deep_copy()
        matcher.consume_tokens(list(ids[-1:] if before else ids))
        self._matchers[ids] = matcher
        if len(self._matchers) > _MATCHERS:
            self._matchers.popitem(last=False)
        return matcher


def with_grammar(model: Any, options: Options) -> Options:
    """The options of a `Generator`, with `json_schema` or `regex` as a prefix function.

    Raises UserError as in `Grammar`, and for options that exclude a grammar.
    """
    for name in ("prefix_function", "draft", "prefixes", "forced"):
        if getattr(options, name) is not None:
            raise UserError(f"{name} and a grammar (json_schema, regex) exclude each other")
    eos_ids = [*dict.fromkeys((*model.end_ids(), *options.stop_ids))]
    size = getattr(model.config, "tgt_vocab_size", None) or model.config.vocab_size
    return replace(options, prefix_function=Grammar(options, model.tgt_tokenizer, eos_ids, size))


@lru_cache(maxsize=8)
def _library_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> tuple["_Vocabulary", Any]:
    """A vocabulary, and the library's tokenizer of it, which takes longer than most grammars."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(tokenizer, vocab_size, eos_id)
    return vocabulary, LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size)


class _Vocabulary:
    """A tokenizer as llguidance requires it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self._encode = tokenizer.encode
        tokens = tokenizer.token_bytes()
        unused = range(len(tokens), vocab_size)
        self.tokens = [*tokens, *(f"<unused {i}>".encode() for i in unused)][:vocab_size]
        specials = {*tokenizer.special_ids, *unused, eos_id}
        self.special_token_ids = sorted(specials)
        self.eos_token_id, self.bos_token_id = eos_id, tokenizer.specials.bos_id

        self._ids: dict[bytes, int] = {}
        for i, token in enumerate(self.tokens):
            if i not in specials:
                self._ids.setdefault(token, i)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that the grammar requires, without a space before it."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._encode(data.decode(errors="ignore"))
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """The longest token at each place, up to a byte that no token begins with."""
        ids, start = [], 0
        longest = max(map(len, self._ids))
        while start < len(data):
            ends = range(min(len(data), start + longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


def _schema(source: str | Mapping[str, Any]) -> Any:
    """A JSON schema that is given as a mapping, as text, or as the path of a file."""
    if not isinstance(source, str):
        return dict(source)
    text, where = source, "json_schema"
    if not source.lstrip().startswith("{"):
        where, text = source, read_text(Path(source))
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: {error}") from None
