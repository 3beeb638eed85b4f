"""API keys from a file."""

import hashlib
import hmac
import json
from collections.abc import Iterable
from pathlib import Path

from heedful.errors import UserError

HIDDEN = "***"
_LONGEST, _SHORTEST = 512, 8  # characters


class Keys:
    """The keys of a file: one a line, `admin KEY` for those that may also replace models.

    Blank lines and lines that begin with # are skipped.

    Args:
        path: None: there are no keys, and every request may use every route but the admin's.

    Raises:
        UserError: a file that cannot be read, has no key, or a line that is no key.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._is_admin: dict[bytes, bool] = {}
        self._written: list[str] = []
        self.reload()

    def __bool__(self) -> bool:
        return self.path is not None

    def reload(self) -> None:
        """Read the file again; after an error the former keys stay."""
        if self.path is None:
            return
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UserError(f"cannot read the keys in {self.path}: {reason}") from None
        keys: dict[bytes, bool] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            is_admin = len(words) == 2 and words[0] == "admin"
            key = words[-1]
            is_key = key.isascii() and _SHORTEST <= len(key) <= _LONGEST
            if len(words) != 1 + is_admin or not is_key:
                raise UserError(
                    f"{self.path}, line {number}: not a key; write one key a line, of {_SHORTEST} "
                    "or more ASCII characters, or `admin` and a key"
                )
            keys[key.encode()] = is_admin
        if not keys:
            raise UserError(f"{self.path} has no key: write one a line, or leave --keys out")
        self._is_admin = keys
        self._written = _written(key.decode() for key in keys)

    def hide(self, text: str, *more: str) -> str:
        """A text for the log, without the keys and the further ones in `more`.

        Also without their forms in JSON, and in JSON that is quoted in JSON.
        """
        for form in (*self._written, *_written(more)):
            text = text.replace(form, HIDDEN)
        return text

    def role(self, key: str | None) -> str | None:
        """`admin`, `user`, or None for a key that is not in the file."""
        if key is None or not key.isascii():
            return None
        role = None
        # All keys are compared, so that the time does not depend on the match.
        for known, is_admin in self._is_admin.items():
            if hmac.compare_digest(known, key.encode()):
                role = "admin" if is_admin else "user"
        return role


def _written(keys: Iterable[str]) -> list[str]:
    """The ways in which a text can have keys, the longest first: a key can begin with another."""
    forms = {key for key in keys if key}
    for _ in range(2):
        forms |= {json.dumps(form)[1:-1] for form in forms}
    return sorted(forms, key=len, reverse=True)


def tenant_of(key: str) -> str:
    """A name for a key, which does not tell it."""
    return hashlib.sha256(key.encode()).hexdigest()
