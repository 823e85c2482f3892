"""Guard against server-side request forgery: it keeps webhooks away from internal addresses."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import httpx

from replicas.errors import InvalidRequest
from serve_app.jobs.webhooks.addresses import AllowedHosts, is_public, literal_address

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a host for a port, or raises OSError if there is none."""

_MAX_URL_CHARACTERS = 2048
_HOST = re.compile(r"[a-z0-9_.:-]+")
_NUM_RESOLVER_THREADS = 64
"""As many threads as attempts in parallel, so that a name that is slow to resolve delays only its own attempt."""


class AddressRefused(Exception):
    """Error for a host without an address, or with one that webhooks may not call."""


class WebhookGuard:
    """Filter for the hosts and addresses that webhooks may call.

    1. An address that is not public is refused, unless the address or the host's name is allowed.
    2. A host with several addresses is refused if one of them is: a mix of public and internal ones is suspicious.
    3. Ports are not restricted; that is left to the operator's firewall.
    """

    def __init__(self, allowed: AllowedHosts, resolve: Resolver) -> None:
        self._allowed = allowed
        self._resolve = resolve

    def check(self, url: str) -> None:
        """Check a URL as far as is possible without resolving its name. `addresses` checks again after resolving it.

        Raises:
            InvalidRequest: it is malformed, not `http` or `https`, or its host is neither public nor allowed.
        """
        host = _host_of(url)
        address = literal_address(host)
        if self._allowed.has_name(host) or (address is not None and self._allowed.has_address(address)):
            return
        is_local = host.rstrip(".").rsplit(".", 1)[-1] == "localhost"
        if is_local or (address is not None and not is_public(address)):
            raise _invalid(f"callback_url leads to {host!r}, which is not public and not in webhook_allowed_hosts")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolve a host and check every address. The caller must connect to these and not resolve the name again.

        Raises:
            AddressRefused: the host has no address, or one that webhooks may not call.
        """
        try:
            addresses = list(dict.fromkeys(await self._resolve(host, port)))
        except (OSError, UnicodeError, OverflowError) as error:
            raise AddressRefused(f"the host {host} is not known: {error}") from error
        if not addresses:
            raise AddressRefused(f"the host {host} has no address")
        if not self._allowed.has_name(host):
            for address in map(ip_address, addresses):
                if not is_public(address) and not self._allowed.has_address(address):
                    raise AddressRefused(f"the host {host} leads to {address}, which is not public")
        return addresses


class SystemResolver:
    """`Resolver` that uses the system's name resolution.

    It has its own thread pool, because names that are slow to resolve may be an attack and must delay nothing else.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_RESOLVER_THREADS, "webhook-names")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses, in the order in which to try them."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)


def _look_up(host: str, port: int) -> list[str]:
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _host_of(url: str) -> str:
    """Return the host of a URL.

    Raises:
        InvalidRequest: the URL is malformed, too long, or not `http` or `https`.
    """
    if len(url) > _MAX_URL_CHARACTERS:
        raise _invalid(f"callback_url has {len(url)} characters; at most {_MAX_URL_CHARACTERS} are accepted")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise _invalid(f"callback_url is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https"):
        raise _invalid("callback_url must begin with http:// or https://")
    host = parsed.raw_host.decode("ascii")
    if not _HOST.fullmatch(host):
        raise _invalid("callback_url must name a host")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise _invalid(f"callback_url has the port {parsed.port}; it must be 1 to 65535")
    return host


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="callback_url")
