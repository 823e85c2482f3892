"""Addresses of webhooks: an address of this machine or its network is refused under any name."""

import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from replicas.errors import InvalidRequest
from serve_app.jobs.webhooks.addresses import Address, AllowedHosts, is_public, literal_address
from serve_app.jobs.webhooks.client import DeliveryFailed, WebhookClient
from serve_app.jobs.webhooks.events import Delivery
from serve_app.jobs.webhooks.guard import AddressRefused, SystemResolver, WebhookGuard
from serve_app.jobs.webhooks.signing import WebhookSigner, new_secret
from testkit.jobs.webhook_receivers import receiving, status

PUBLIC = "93.184.216.34"

# One or more of every kind of address that is not of the public internet.
REFUSED = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.8.8.8",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.0.1",
    "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:8.8.8.8", "64:ff9b::8.8.8.8",
    "64:ff9b::10.0.0.1", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:1::", "2001:10::1", "2001:db8::1",
    "2002:7f00:1::", "2002:808:808::", "3fff::1", "5f00::1", "fc00::1", "fd12:3456::1", "fe80::1", "fe80::1%eth0",
    "fec0::1", "ff02::1", "ff0e::1",
]  # fmt: skip
ACCEPTED = [
    "8.8.8.8", PUBLIC, "100.63.255.255", "100.128.0.0", "172.15.0.1", "172.32.0.1", "192.0.1.1", "223.255.255.1",
    "2606:4700::1111", "2a00:1450:4001:81b::200e", "2003::1",
]  # fmt: skip


class FakeNames:
    """Names and their addresses; one with several answers gives one after the other, the last for ever."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(found) for name, found in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def guard(names: FakeNames, *allowed: str) -> WebhookGuard:
    return WebhookGuard(AllowedHosts.parse(", ".join(allowed)), names)


@pytest.mark.parametrize("address", REFUSED)
async def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(AddressRefused):
        await guard(FakeNames(evil_test=[[address]])).addresses("evil.test", 80)


@pytest.mark.parametrize("address", ACCEPTED)
async def test_public_addresses_are_accepted(address: str) -> None:
    assert await guard(FakeNames(good_test=[[address]])).addresses("good.test", 443) == [address]


async def test_one_refused_address_among_others_refuses_the_host() -> None:
    with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
        await guard(FakeNames(evil_test=[[PUBLIC, "10.0.0.1"]])).addresses("evil.test", 80)


@pytest.mark.parametrize("answer", [[], None])
async def test_a_host_without_an_address_is_refused(answer: list[str] | None) -> None:
    names = FakeNames() if answer is None else FakeNames(none_test=[answer])
    with pytest.raises(AddressRefused):
        await guard(names).addresses("none.test", 80)


@pytest.mark.parametrize(
    ("entry", "host", "address"),
    [
        ("hooks.internal", "hooks.internal", "10.1.2.3"),
        ("Hooks.Internal.", "hooks.internal", "10.1.2.3"),
        ("10.1.0.0/16", "hooks.internal", "10.1.2.3"),
        ("10.1.2.3", "hooks.internal", "10.1.2.3"),
        ("fd00::/8", "hooks.internal", "fd00::7"),
    ],
)
async def test_allow_listed_hosts_may_be_called(entry: str, host: str, address: str) -> None:
    names = FakeNames(hooks_internal=[[address]], other_internal=[["10.2.0.1"]])
    assert await guard(names, entry).addresses(host, 80) == [address]
    with pytest.raises(AddressRefused):
        await guard(names, entry).addresses("other.internal", 80)


@pytest.mark.parametrize("entry", ["http://x", "x:80", "10.0.0.0/40", "*.internal", "a b", "[::1]"])
def test_a_malformed_allow_list_entry_is_refused_at_start(entry: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        AllowedHosts.parse(entry)


REFUSED_URLS = [
    "ftp://good.test/", "file:///etc/passwd", "gopher://x/", "//good.test/", "good.test", "", "http://", "http:///x",
    "http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://017700000001/",
    "http://[::1]/", "http://[::ffff:8.8.8.8]/", "http://[fe80::1%25eth0]/", "http://localhost:8000/",
    "http://a.LOCALHOST./", "https://169.254.169.254/latest/", "http://user@10.0.0.1/", "http://a%2eb/",
    "http://good.test:99999/", "http://good.test:0/", "http://good.test/" + "x" * 2048, "http://a b/", "http://①.test/",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_a_plainly_forbidden_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guard(FakeNames()).check(url)
    assert caught.value.param == "callback_url"


@pytest.mark.parametrize(
    "url",
    ["http://good.test/x?y=1", "https://GOOD.test:8443/", f"http://{PUBLIC}/", "http://[2606:4700::1111]:80/",
     "https://münchen.de/", "http://user:password@a_b.test/"],
)  # fmt: skip
def test_a_well_formed_url_is_accepted_without_resolving_it(url: str) -> None:
    names = FakeNames()
    guard(names).check(url)
    assert names.asked == []


def test_an_allow_listed_url_is_accepted() -> None:
    guard(FakeNames(), "localhost").check("http://localhost:9000/")
    guard(FakeNames(), "127.0.0.0/8").check("http://127.1/")


@pytest.mark.parametrize(
    ("host", "address"),
    [("0x7f000001", ip_address("127.0.0.1")), ("::1", ip_address("::1")), ("1.2.3.4.test", None)],
)
def test_literal_addresses_are_distinguished_from_names(host: str, address: Address | None) -> None:
    assert literal_address(host) == address


async def test_the_system_resolver_knows_loopback() -> None:
    assert set(await SystemResolver()("localhost", 80)) <= {"127.0.0.1", "::1"}
    assert await SystemResolver()("127.1", 80) == ["127.0.0.1"]


# Below, 127.0.0.1 plays an address that may be called and 127.0.0.2 one that may not.
ALLOWED, FORBIDDEN = "127.0.0.1", "127.0.0.2"


def delivery(url: str) -> Delivery:
    return Delivery("evt_1", "batch_1", "t", "batch.completed", url, "{}", 0, 0.0)


@asynccontextmanager
async def calling(names: FakeNames, tls: ssl.SSLContext | None = None) -> AsyncIterator[WebhookClient]:
    client = WebhookClient(WebhookSigner(new_secret()), guard(names, ALLOWED), tls=tls, timeout_s=5.0)
    try:
        yield client
    finally:
        await client.close()


async def test_the_checked_address_is_the_connected_one() -> None:
    names = FakeNames(evil_test=[[ALLOWED], [FORBIDDEN]])
    async with receiving(status(200), (ALLOWED, FORBIDDEN)) as receiver, calling(names) as client:
        url = f"http://evil.test:{receiver.port}/hook"
        await client.post(delivery(url))
        assert names.asked == ["evil.test"]  # once: what was checked is what was called
        with pytest.raises(DeliveryFailed, match=FORBIDDEN):
            await client.post(delivery(url))
    [request] = receiver.requests
    assert (request.address, request.headers["host"]) == (ALLOWED, f"evil.test:{receiver.port}")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(code: int) -> None:
    names = FakeNames(evil_test=[[ALLOWED]])
    async with receiving(status(code, "Location: /elsewhere")) as receiver, calling(names) as client:
        with pytest.raises(DeliveryFailed, match=str(code)):
            await client.post(delivery(f"http://evil.test:{receiver.port}/hook"))
    assert [request.path for request in receiver.requests] == ["/hook"]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with receiving(status(200)) as receiver, calling(FakeNames(good_test=[[ALLOWED]])) as client:
        await client.post(delivery(f"http://good.test:{receiver.port}/"))
    assert len(receiver.requests) == 1


async def test_the_next_address_is_tried_after_a_refused_connection() -> None:
    names = FakeNames(good_test=[["127.0.0.3", ALLOWED]])
    client = WebhookClient(WebhookSigner(new_secret()), guard(names, "127.0.0.0/8"))
    async with receiving(status(200)) as receiver:
        await client.post(delivery(f"http://good.test:{receiver.port}/"))
    await client.close()
    assert receiver.requests[0].address == ALLOWED


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for `good.test`, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    path, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(path), "-days", "2", "-subj", "/CN=good.test"]
    command += ["-addext", "subjectAltName=DNS:good.test"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return path, key


async def test_tls_verifies_the_name_and_shares_no_connection(certificate: tuple[Path, Path]) -> None:
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(*certificate)
    seen: list[str | None] = []
    server_tls.sni_callback = lambda _socket, name, _context: seen.append(name)
    names = FakeNames(good_test=[[ALLOWED]], other_test=[[ALLOWED]])
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    async with receiving(status(200), tls=server_tls) as receiver, calling(names, trusting) as client:
        await client.post(delivery(f"https://good.test:{receiver.port}/"))
        await client.post(delivery(f"https://good.test:{receiver.port}/"))
        with pytest.raises(DeliveryFailed, match="CERTIFICATE_VERIFY_FAILED"):
            await client.post(delivery(f"https://other.test:{receiver.port}/"))
    assert seen == ["good.test", "good.test", "other.test"]
    assert [request.connection for request in receiver.requests] == [1, 2]
