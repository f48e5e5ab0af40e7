"""The guard, asked directly, with a rebinding DNS server, and in a network namespace where refused addresses exist."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.test_utils import TestServer

from toolhost.browsing.errors import AddressRefused, FetchError
from toolhost.browsing.fetch import Fetcher
from toolhost.browsing.guard import Guard, literal_address
from toolhost.search.base import DomainList, Filters

REFUSED = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.8.8"),
    *("169.254.169.254", "169.254.0.1", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.0.8", "192.0.2.1"),
    *("192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250"),
    *("240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
    *("2002:7f00:1::", "2002:a00:1::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "3fff::1", "100::1", "5f00::1"),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:4860:4860::8888%1"),
]
PERMITTED = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "100.128.0.1", "192.0.1.1", "2606:4700::1111"]

SPELLINGS = [
    *("169.254.169.254", "0x7f.1", "0177.0.0.1", "2130706433", "0x7f000001", "127.1", "127.0.0.1.", "0"),
    *("[::ffff:127.0.0.1]", "[::1]", "[::ffff:7f00:1]", "192.0.0.192", "[64:ff9b::a9fe:a9fe]", "[fe80::1]"),
    *("①②⑦.⓪.⓪.①", "127。0。0。1"),
]


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(AddressRefused):
        Guard().check_address(address)


@pytest.mark.parametrize("address", PERMITTED)
def test_public_addresses_are_permitted(address: str) -> None:
    Guard().check_address(address)


@pytest.mark.parametrize("host", SPELLINGS)
def test_a_literal_address_in_a_url_is_refused_however_spelled(host: str) -> None:
    with pytest.raises(FetchError):
        Guard().check_url(f"http://{host}/", Filters())


@pytest.mark.parametrize("address", REFUSED)
def test_no_socket_is_made_for_a_refused_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object, **__: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", no_socket)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(AddressRefused):
        Guard().socket_factory()((family, socket.SOCK_STREAM, 6, "", (address, 80)))


def test_networks_the_operator_names_are_permitted() -> None:
    guard = Guard(allow_networks=[ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")])
    guard.check_address("10.1.2.3")
    guard.check_address("fd00::1")
    with pytest.raises(AddressRefused):
        guard.check_address("10.2.0.1")


@pytest.mark.parametrize("port", [22, 25, 6379, 3000, 0, 65535])
def test_other_ports_are_refused(port: int) -> None:
    with pytest.raises(FetchError, match="is not permitted; permitted are 80, 443, 8080, 8443"):
        Guard().check_url(f"http://e.example:{port}/", Filters())


@pytest.mark.parametrize(
    "url",
    ["http://e.example\\@127.0.0.1/", "http://e.example/\r\nHost: x", "http://e.example:99999/", "http://e.example:x/",
     "http:///x", "//e.example/", "http://e.example/\x00", "http://" + "a" * 9000 + "/"],
)  # fmt: skip
def test_urls_that_mean_different_things_to_different_readers_are_refused(url: str) -> None:
    with pytest.raises(FetchError):
        Guard().check_url(url, Filters())


def test_credentials_and_fragment_are_stripped() -> None:
    target = Guard().check_url("https://user:secret@e.example/p?q=1#f", Filters())
    assert str(target) == "https://e.example/p?q=1"


def test_domain_lists_cover_subdomains_and_deny_wins() -> None:
    filters = Filters((DomainList.of(allow=["Example.org", "*.o.example"], deny=["bad.example.org"]),))
    for host, permitted in {
        "example.org": True,
        "a.example.org": True,
        "notexample.org": False,
        "bad.example.org": False,
        "x.bad.example.org": False,
        "o.example": True,
        "other.net": False,
        "example.org.": True,
    }.items():
        assert filters.permits(host) is permitted, host
    narrowed = filters.narrowed(DomainList.of(allow=["a.example.org", "other.net"]))
    assert narrowed.permits("a.example.org") and not narrowed.permits("other.net")
    assert not narrowed.permits("example.org") and narrowed.allow == ("a.example.org",)


def test_spelled_out_numbers_are_addresses_and_names_are_not() -> None:
    assert literal_address("0x7f.1") == "127.0.0.1"
    assert literal_address("e.example") is None


class Rebinding(asyncio.DatagramProtocol):
    """A DNS server whose answer to an A question changes with every question."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        address = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        question = data[12:]
        header = data[:2] + struct.pack("!HHHHH", 0x8180, 1, 1, 0, 0)
        answer = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
        self.transport.sendto(header + question + answer, sender)  # type: ignore[attr-defined]


class LoopbackResolver(AbstractResolver):
    """Asks the DNS server of the test, each time anew."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        name = b"".join(bytes([len(label)]) + label.encode() for label in host.split(".")) + b"\0"
        query = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + name + struct.pack("!HH", 1, 1)
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", self._port))
            await loop.sock_sendall(client, query)
            answer = await asyncio.wait_for(loop.sock_recv(client, 512), 5)
        address = socket.inet_ntoa(answer[-4:])
        return [
            ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=6, flags=0)
        ]  # fmt: skip

    async def close(self) -> None:
        pass


@pytest.fixture
async def secret() -> AsyncIterator[tuple[int, list[str]]]:
    """A server on every loopback address: its port, and the addresses it was reached at."""
    reached: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        reached.append(request.transport.get_extra_info("sockname")[0])
        if request.path == "/to-localhost":
            return web.Response(status=302, headers={"Location": f"http://localhost:{port}/"})
        if request.path == "/to-inside":
            return web.Response(status=302, headers={"Location": f"http://inside.test:{port}/"})
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app, host="0.0.0.0")
    await server.start_server()
    assert server.port is not None
    port = server.port
    yield port, reached
    await server.close()


async def rebinding_fetcher(answers: list[str]) -> tuple[Fetcher, Rebinding]:
    """A fetcher for which 127.0.0.2 is public and which asks a DNS server with these answers."""
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Rebinding(answers), local_addr=("127.0.0.1", 0)
    )
    guard = Guard(allow_networks=[ipaddress.ip_network("127.0.0.2/32")], ports=range(1, 65536))
    return Fetcher(guard, resolver=LoopbackResolver(transport.get_extra_info("sockname")[1])), protocol


async def test_a_name_that_is_rebound_is_refused_when_it_connects(secret: tuple[int, list[str]]) -> None:
    port, reached = secret
    fetcher, dns = await rebinding_fetcher(["127.0.0.2", "127.0.0.1", "10.0.0.1"])
    assert (await fetcher.fetch(f"http://rebind.test:{port}/", Filters())).body == b"hello"
    assert reached == ["127.0.0.2"]
    for _ in range(2):
        await fetcher.aclose()  # a kept connection would need no name
        with pytest.raises(FetchError, match="its address is not on the public Internet"):
            await fetcher.fetch(f"http://rebind.test:{port}/", Filters())
    assert dns.asked == 3 and reached == ["127.0.0.2"]
    await fetcher.aclose()
    dns.transport.close()


@pytest.mark.parametrize(
    ("path", "answers"), [("/to-localhost", ["127.0.0.2", "127.0.0.1"]), ("/to-inside", ["127.0.0.2", "10.9.9.9"])]
)
async def test_a_redirect_inside_is_refused(secret: tuple[int, list[str]], path: str, answers: list[str]) -> None:
    port, reached = secret
    fetcher, dns = await rebinding_fetcher(answers)
    with pytest.raises(FetchError, match="not on the public Internet"):
        await fetcher.fetch(f"http://public.test:{port}{path}", Filters())
    assert dns.asked == 2 and reached == ["127.0.0.2"]
    await fetcher.aclose()
    dns.transport.close()


async def test_a_redirect_to_another_scheme_port_or_domain_is_refused(secret: tuple[int, list[str]]) -> None:
    port, reached = secret
    fetcher, dns = await rebinding_fetcher(["127.0.0.2"])
    filters = Filters((DomainList.of(allow=["public.test"]),))
    with pytest.raises(FetchError, match=r"the domain inside\.test is not permitted"):
        await fetcher.fetch(f"http://public.test:{port}/to-inside", filters)
    assert reached == ["127.0.0.2"]
    await fetcher.aclose()
    dns.transport.close()


NAMESPACE = Path(__file__).with_name("ssrf_namespace.py")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or shutil.which("ip") is None
    or subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs network namespaces",
)
def test_in_a_namespace_where_inside_addresses_answer_nothing_reaches_them() -> None:
    """Every address is the namespace's own, with a server behind it; a fetcher without a guard is the control."""
    run = subprocess.run(
        ["unshare", "-rn", sys.executable, str(NAMESPACE)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert len(result["refused"]) >= 10
    assert result["control"] == len(result["refused"]), result
    assert all(reason for reason in result["refused"].values()), result
    assert result["packets"] == 0 and result["connections"] == 0


async def test_a_name_is_resolved_by_the_system_and_then_judged(secret: tuple[int, list[str]]) -> None:
    port, reached = secret
    strict = Fetcher(Guard(ports=range(1, 65536)))
    with pytest.raises(FetchError, match="its address is not on the public Internet"):
        await strict.fetch(f"http://localhost:{port}/", Filters())
    await strict.aclose()
    assert reached == []
    loopback = [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")]
    permitted = Fetcher(Guard(allow_networks=loopback, ports=range(1, 65536)))
    assert (await permitted.fetch(f"http://localhost:{port}/", Filters())).body == b"hello"
    await permitted.aclose()
