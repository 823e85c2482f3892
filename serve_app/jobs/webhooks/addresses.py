"""Which addresses are of the public internet, and which others an operator lets us call."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

Address = IPv4Address | IPv6Address

# IANA's registries of special-purpose addresses, and multicast. Listed here because `is_global` and `is_private`
# of the standard library mean different things in different releases.
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
"""All other IPv6 addresses are local or multicast, or hold an IPv4 address: mapped, compatible or behind NAT64."""


def is_public(address: Address) -> bool:
    """Whether an address is an ordinary one of the public internet.

    Those that hold another address (IPv4-mapped, 6to4, Teredo, NAT64) are not, whatever they hold.
    """
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def literal_address(host: str) -> Address | None:
    """The address that a host is without being a name: also `127.1`, `0x7f000001` and their like."""
    with contextlib.suppress(ValueError):
        return ip_address(host)
    with contextlib.suppress(OSError, UnicodeError):
        return IPv4Address(socket.inet_aton(host))
    return None


class AllowedHosts:
    """Hosts and networks that may be called though they are not public."""

    def __init__(self, names: frozenset[str], networks: tuple[IPv4Network | IPv6Network, ...]) -> None:
        self._names = names
        self._networks = networks

    @classmethod
    def parse(cls, entries: Iterable[str]) -> Self:
        """From addresses, networks (`10.1.0.0/16`) and names of hosts.

        Raises:
            ValueError: an entry is none of these.
        """
        names, networks = set(), []
        for entry in entries:
            try:
                networks.append(ip_network(entry, strict=False))
            except ValueError:
                if not entry or set(entry) & set("/:@*? "):
                    raise ValueError(f"{entry!r} is neither the name of a host nor an address or network") from None
                names.add(_plain(entry))
        return cls(frozenset(names), tuple(networks))

    def has_name(self, host: str) -> bool:
        """Whether a host may be called wherever its name leads."""
        return _plain(host) in self._names

    def has_address(self, address: Address) -> bool:
        """Whether an address may be called."""
        return any(address in network for network in self._networks)


def _plain(host: str) -> str:
    return host.lower().rstrip(".")
