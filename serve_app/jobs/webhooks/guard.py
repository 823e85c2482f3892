"""Keeps webhooks away from addresses that only we can reach: server-side request forgery."""

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
"""The addresses of a host, for a port; raises OSError where there is none."""

_MAX_URL_CHARACTERS = 2048
_HOST = re.compile(r"[a-z0-9_.:-]+")
_NUM_RESOLVER_THREADS = 64
"""As many as attempts may be under way: a name that is slow to resolve holds up none but its own."""


class AddressRefused(Exception):
    """A host leads where webhooks may not go, or nowhere."""


class WebhookGuard:
    """Says where a host may be called.

    1. An address that is not public is refused, unless it or the host's name is allow-listed.
    2. One such address among several refuses the host: whose names lead to both means no good.
    3. Ports are the operator's firewall's business.
    """

    def __init__(self, allowed: AllowedHosts, resolve: Resolver) -> None:
        self._allowed = allowed
        self._resolve = resolve

    def refuse(self, url: str) -> None:
        """Refuse a URL that can be seen to be forbidden without asking anybody; `addresses` looks again.

        Raises:
            InvalidRequest: it is not `http` or `https`, or its host is not public and not allow-listed.
        """
        host = _host_of(url)
        address = literal_address(host)
        if self._allowed.has_name(host) or (address is not None and self._allowed.has_address(address)):
            return
        is_local = host.rstrip(".").rsplit(".", 1)[-1] == "localhost"
        if is_local or (address is not None and not is_public(address)):
            raise _invalid(f"callback_url leads to {host!r}, which is not public and not in webhook_allowed_hosts")

    async def addresses(self, host: str, port: int) -> list[str]:
        """Where the host is now, every address checked; whoever connects must use these and not ask again.

        Raises:
            AddressRefused: it is nowhere, or where webhooks may not go.
        """
        try:
            found = list(dict.fromkeys(await self._resolve(host, port)))
        except (OSError, UnicodeError, OverflowError) as error:
            raise AddressRefused(f"the host {host} is not known: {error}") from error
        if not found:
            raise AddressRefused(f"the host {host} has no address")
        if not self._allowed.has_name(host):
            for address in map(ip_address, found):
                if not is_public(address) and not self._allowed.has_address(address):
                    raise AddressRefused(f"the host {host} leads to {address}, which is not public")
        return found


class SystemResolver:
    """A `Resolver` that asks as every program on this machine does.

    In threads of its own: names that are slow to resolve are an attack, and must hold up nothing else.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_RESOLVER_THREADS, "webhook-names")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses, in the order in which they should be tried."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _look_up, host, port)


def _look_up(host: str, port: int) -> list[str]:
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _host_of(url: str) -> str:
    """The host of a well-formed URL."""
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
        raise _invalid(f"callback_url has the port {parsed.port}, which there is not")
    return host


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="callback_url")
