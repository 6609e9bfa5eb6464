"""Addresses of listeners: host:port, and whether a host is this machine only."""

import ipaddress
from dataclasses import dataclass

from springtide.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, setting: str = "address") -> Address:
    """`host:port` or `[v6]:port`. Raises InvalidArgument naming `setting`."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(
            field=setting,
            value=text,
            problem="is not host:port with a port of 0 to 65535",
            remedy=f"Set {setting} to an address such as 127.0.0.1:7400.",
        )
    return Address(host, int(port))
