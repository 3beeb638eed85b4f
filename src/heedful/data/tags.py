"""Tags: single tokens put before a text, such as `<2de>` for the language of the output."""

from collections.abc import Collection
from typing import Any

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError


def tag_id(tokenizer: Tokenizer, tag: str) -> int:
    """The id of a tag: of a special token, or of the one token that its text is.

    Raises:
        UserError: the tokenizer splits the tag, or does not know it.
    """
    special = {tokenizer.piece(i): i for i in tokenizer.special_ids}
    if tag in special:
        return special[tag]
    ids = tokenizer.encode(tag)
    if len(ids) == 1 and ids[0] != tokenizer.unk_id:
        return ids[0]
    pieces = " ".join(tokenizer.tokens(ids))
    raise UserError(
        f"the tokenizer has no token {tag}, which it splits ({pieces}); use a tag that it has, or "
        "train a tokenizer with these corpora"
    )


def allow_in_texts(content: dict[str, Any], tags: Collection[str]) -> dict[str, Any]:
    """The content of a `tokenizer.json` for other programs, where tags are written in texts.

    There they are no special tokens, which such a tokenizer may split, and the space after a tag
    is not part of the text.
    """
    added = [
        token | {"special": False, "rstrip": True} if token["content"] in tags else token
        for token in content["added_tokens"]
    ]
    return {**content, "added_tokens": added}
