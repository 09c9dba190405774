"""The hosts of ACLs: an address, a range of addresses in CIDR notation, or `*`."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

NETWORK_MARK = "/"
MAPPED = IPv6Network("::ffff:0:0/96")
"""The IPv4 addresses as IPv6 has them."""


def parse_address(host: str) -> Address | None:
    """Return the address, or None for a name. An IPv4 address mapped to IPv6 is the IPv4 address, as in Java."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def parse_network(host: str) -> Network | None:
    """Return the range of addresses, or None if the text is not one. A range of mapped addresses is the IPv4 range."""
    try:
        network = ip_network(host, strict=False) if NETWORK_MARK in host else None
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and network.subnet_of(MAPPED):
        first = network.network_address.ipv4_mapped
        assert first is not None
        return IPv4Network((first, network.prefixlen - MAPPED.prefixlen))
    return network


def canonical(host: str) -> str:
    """Return the same text for every spelling of an address; other text is unchanged."""
    address = parse_address(host)
    return host if address is None else str(address)
