"""Forms with files (multipart/form-data, RFC 7578) as the fields of a JSON body."""

import base64
import itertools
import re
import secrets
from email.errors import MessageError
from email.message import Message
from email.parser import BytesParser
from email.policy import compat32

from heedful.serve.errors import HttpError

MEDIA_TYPE = "multipart/form-data"
_MAX_PARTS = 100
# The type by which the parser knows the form itself, in place of the client's. No client can name
# it in a part: the parser would read each line once for every form around it.
_FORM = f"multipart/{secrets.token_hex(16)}"
_PARAMETER = re.compile(r';\s*(\w+)=(?:"([^"]*)"|([^\s";]+))')  # .NET's clients quote no word


class _Part(Message):
    """The form, or one of its parts, whose content is not parsed."""

    def get_content_type(self) -> str:
        """The type of the form; of a part always that of bytes."""
        found = super().get_content_type()
        return found if found == _FORM else "application/octet-stream"


def fields_of(content_type: str, body: bytes) -> list[tuple[str, str]]:
    """The fields of a form: texts, and of a file its content in Base64 and its name as `filename`.

    Raises:
        HttpError: 400 for a body without parts, or with too many; a field that is not UTF-8; a
            second file.
    """
    parameters = content_type.partition(";")[2]
    head = f"Content-Type: {_FORM};{parameters}\r\n\r\n".encode("latin-1", "replace")
    try:
        parser = BytesParser(_Part, policy=compat32)
        boundary = str(parser.parsebytes(head).get_boundary("")).encode("ascii", "surrogateescape")
        begins = re.finditer(rb"^--%s[ \t]*\r?$" % re.escape(boundary), body, re.MULTILINE)
        count = sum(1 for _ in itertools.islice(begins, _MAX_PARTS + 1))
        parts = parser.parsebytes(head + body).get_payload() if 0 < count <= _MAX_PARTS else []
        if not isinstance(parts, list) or not parts:
            raise HttpError(400, f"the form has no parts, or more than {_MAX_PARTS}")
        fields: list[tuple[str, str]] = []
        for part in parts:
            assert isinstance(part, Message)
            new = _fields(part)
            if len(new) > 1 and any(name == "filename" for name, _ in fields):
                raise HttpError(400, "the form has several files: send one", parameter="file")
            fields += new
        return fields
    except (MessageError, ValueError, LookupError, RecursionError, TypeError):
        raise HttpError(400, "the form is broken, or a field is not UTF-8") from None


def _fields(part: Message) -> list[tuple[str, str]]:
    """The field of a part, and of a file its name."""
    parameters = _parameters(part)
    name, filename = parameters.get("name"), parameters.get("filename")
    content = part.get_payload(decode=True)
    if not name or not isinstance(content, bytes):
        raise ValueError(name)
    if filename is None and name != "file":
        return [(name, content.decode())]
    return [(name, base64.b64encode(content).decode()), ("filename", filename or "")]


def _parameters(part: Message) -> dict[str, str]:
    """The parameters of the part's header; browsers write names of files in UTF-8."""
    raw = {key.lower(): str(value) for key, value in part.raw_items()}
    text = raw.get("content-disposition", "").encode("utf-8", "surrogateescape").decode()
    return {match[1].lower(): match[2] or match[3] or "" for match in _PARAMETER.finditer(text)}
