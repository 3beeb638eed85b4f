"""Compiled nets that this user made: their native code is opened, that of others is not.

A model's folder can come from anybody, and whoever wrote its code also wrote the hashes beside it.
So the user's cache has an empty file for each net that was compiled here, named by `digest_of`.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.backends.manifest import NetFacts
from heedful.errors import UserError
from heedful.kernels.build import code_folder


def digest_of(
    code: Mapping[str, str], facts: NetFacts, constants: Mapping[str, Mapping[str, Any]]
) -> str:
    """The SHA-256 of all that the code depends on but the values of its constants.

    Compiled graphs do not check the sizes of their constants and caches, which therefore count too.

    Args:
        code: the SHA-256 of the files with code, by name.
        constants: `described`, of those of each graph, by name.
    """
    content = {"code": code, "facts": asdict(facts), "constants": constants}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def described(source: str, tensor: Tensor) -> list[Any]:
    """The source of a constant, and what its memory must be like."""
    return [source, str(tensor.dtype), [*tensor.shape]]


def records() -> Path:
    """The folder of the records; raises UserError as `code_folder`."""
    return code_folder("compiled")


def record(digest: str) -> None:
    """Record a net that was compiled here; raises UserError if the cache cannot be used."""
    path = records() / digest
    try:
        if not _is_own(path):
            path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; set HEEDFUL_CACHE") from None


def check_recorded(digest: str, conversion: Path, model: Path) -> None:
    """Raise UserError unless this user compiled a conversion of a model here."""
    try:
        is_recorded = _is_own(records() / digest)
        reason = "was not compiled by you on this machine"
    except (UserError, OSError) as error:
        is_recorded, reason = False, f"cannot be checked ({error})"
    if not is_recorded:
        raise UserError(
            f"{conversion} {reason}, and would run native code: run `heedful optimize {model}`, or "
            "give trust_compiled=True if you trust whoever made it"
        )


def _is_own(path: Path) -> bool:
    """True for a file that this user made, as a record must be; False for a link."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
