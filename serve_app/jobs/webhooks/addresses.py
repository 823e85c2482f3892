"""Public internet addresses, and the other hosts and addresses that an operator allows."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

Address = IPv4Address | IPv6Address

# IANA's registries of special-purpose addresses, and multicast. They are listed here because `is_global` and
# `is_private` of the standard library differ between releases of Python.
_NOT_PUBLIC = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
        "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
        "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
)  # fmt: skip
_GLOBAL_UNICAST = ip_network("2000::/3")
"""Range of public IPv6 addresses. Others are local or multicast, or embed an IPv4 address (mapped, compatible,
NAT64)."""


def is_public(address: Address) -> bool:
    """Return True if an address belongs to the public internet.

    An address that embeds another one (IPv4-mapped, 6to4, Teredo, NAT64) never counts as public.
    """
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def literal_address(host: str) -> Address | None:
    """Parse a host that is an address instead of a name, also in forms such as `127.1` or `0x7f000001`.

    Return None if the host is a name.
    """
    with contextlib.suppress(ValueError):
        return ip_address(host)
    with contextlib.suppress(OSError, UnicodeError):
        return IPv4Address(socket.inet_aton(host))
    return None


class AllowedHosts:
    """Hosts and networks that may be called although they are not public."""

    def __init__(self, names: frozenset[str], networks: tuple[IPv4Network | IPv6Network, ...]) -> None:
        self._names = names
        self._networks = networks

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse addresses, networks (`10.1.0.0/16`) and host names, separated by commas.

        Raises:
            ValueError: an entry is none of these.
        """
        names, networks = set(), []
        for entry in filter(None, map(str.strip, text.split(","))):
            try:
                networks.append(ip_network(entry, strict=False))
            except ValueError:
                if set(entry) & set("/:@*? "):
                    raise ValueError(f"{entry!r} is neither the name of a host nor an address or network") from None
                names.add(_plain(entry))
        return cls(frozenset(names), tuple(networks))

    def has_name(self, host: str) -> bool:
        """Return True if a host name is allowed; it may then resolve to any address."""
        return _plain(host) in self._names

    def has_address(self, address: Address) -> bool:
        """Return True if an address is in an allowed network."""
        return any(address in network for network in self._networks)


def _plain(host: str) -> str:
    return host.lower().rstrip(".")
