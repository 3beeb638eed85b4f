"""The names that a server answers to.

Another site can let its own name point to a server that it cannot reach (DNS rebinding): to the
browser its pages are then of the server's origin. Only the header Host tells them apart. An address
in that header cannot be another site's, so that every address is allowed.
"""

import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from heedful.errors import UserError

ALL = "*"
_NAME = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*")
_HEADER = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")  # a name or an address, and a port


class AllowedHosts:
    """The hosts that requests may name: addresses, localhost, this machine, and the given names.

    Args:
        names: `*.example.org` stands for all names below it, `*` for all.
        origins: whose hosts are allowed, too.

    Raises:
        UserError: something else than a name is given.
    """

    def __init__(self, names: Sequence[str], origins: Sequence[str] = ()) -> None:
        for name in names:
            if name != ALL and not is_address(name) and not _NAME.fullmatch(name):
                raise UserError(
                    f"{name!r} is no name of a host; give one such as models.example.org, without "
                    "https:// and port"
                )
        machine = socket.gethostname()
        short = machine.partition(".")[0]
        own = ("localhost", "*.localhost", machine, short, f"{short}.local")
        hosts = [urlsplit(origin).hostname or "" for origin in origins]
        self._names = {_normal(name) for name in (*own, *names, *hosts)} - {""}

    def __contains__(self, header: object) -> bool:
        """True if a request with this header Host may be answered."""
        match = _HEADER.fullmatch(str(header))
        host = _normal(match[1].strip("[]")) if match else ""
        if ALL in self._names or is_address(host) or host in self._names:
            return True
        return any(host.endswith(name[1:]) for name in self._names if name.startswith("*."))


def is_loopback(host: str) -> bool:
    """True for a name or address of this machine that no other one can reach."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """True for an address of IPv4 or IPv6, unlike a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _normal(name: str) -> str:
    """A name as DNS compares it."""
    return name.lower().removesuffix(".")
