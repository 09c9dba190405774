"""HOST:PORT addresses, as written in flags and files, and lists of them."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

PORT_MAX = 65_535


class EndpointError(ValueError):
    """Text that is not HOST:PORT; the message says how it should look."""


class Endpoint(NamedTuple):
    """A host (name, IPv4 or IPv6 without brackets) and a port; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise EndpointError(f"{text!r} is not HOST:PORT: write an IPv6 address in brackets, as in [::1]:9092")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
            raise EndpointError(f"{text!r} is not HOST:PORT: write it as in 127.0.0.1:9092")
        return cls(host, int(port))

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every interface, an address to which no remote client can connect."""
        address = self._ip_address
        return self.host == "*" or (address is not None and address.is_unspecified)

    @property
    def is_loopback(self) -> bool:
        address = self._ip_address
        return self.host == "localhost" or (address is not None and address.is_loopback)

    @property
    def _ip_address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_bootstrap(text: str) -> list[Endpoint]:
    """Return the addresses in HOST:PORT[,...]."""
    endpoints = [Endpoint.parse(part) for part in text.split(",") if part.strip()]
    if not endpoints:
        raise EndpointError("the list of brokers is empty: name one, as in 127.0.0.1:9092")
    return endpoints
