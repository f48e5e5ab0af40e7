"""Run inside a network namespace of its own by test_guard: gives the loopback device the refused addresses, listens on
them, and fetches each with the guard and, as a control, without it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

from toolhost.browsing.errors import AddressRefused, FetchError
from toolhost.browsing.fetch import Fetcher, FetchLimits
from toolhost.browsing.guard import Guard
from toolhost.search.base import Filters
from toolhost.search.retry import RetryPolicy

ADDRESSES = ["169.254.169.254", "192.0.0.192", "10.1.2.3", "192.168.7.7", "100.100.100.200", "168.63.129.16"]
ADDRESSES_6 = ["fd00:ec2::254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"]
NAMES = {"metadata.test": "169.254.169.254", "ten.test": "10.1.2.3", "six.test": "fd00:ec2::254"}
HOSTS = [*ADDRESSES, *(f"[{address}]" for address in ADDRESSES_6), *NAMES, "0x7f.1", "[::ffff:127.0.0.1]", "localhost"]


class NoGuard(Guard):
    """The control: everything is permitted."""

    def check_address(self, text: str) -> None:
        pass


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def set_up() -> None:
    run("ip", "link", "set", "lo", "up")
    for address in ADDRESSES:
        run("ip", "addr", "add", f"{address}/32", "dev", "lo")
    for address in ADDRESSES_6:
        run("ip", "-6", "addr", "add", f"{address}/128", "dev", "lo", "nodad")


def packets() -> int:
    """Packets the only device of the namespace has sent."""
    output = subprocess.run(["ip", "-j", "-s", "link", "show", "lo"], check=True, capture_output=True, text=True).stdout
    return int(json.loads(output)[0]["stats64"]["tx"]["packets"])


class Names:
    """Resolves the names of this test without a DNS server."""

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[dict[str, object]]:
        address = NAMES.get(host)
        if address is None:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [{"hostname": host, "host": address, "port": port, "family": kind, "proto": 6, "flags": 0}]

    async def close(self) -> None:
        pass


async def main() -> None:
    set_up()
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret")
        await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(serve, host, 80) for host in ("0.0.0.0", "::")]
    retry, limits = RetryPolicy(attempts=2, delay=0.01), FetchLimits(seconds=5)
    before = packets()
    refused = {}
    guarded = Fetcher(Guard(), retry=retry, limits=limits, resolver=Names())  # type: ignore[arg-type]
    for host in HOSTS:
        try:
            await guarded.fetch(f"http://{host}/", Filters())
            refused[host] = ""
        except AddressRefused as error:
            refused[host] = str(error)
    await guarded.aclose()
    sent, reached = packets() - before, connections

    control = 0
    open_fetcher = Fetcher(NoGuard(), retry=retry, limits=limits, resolver=Names())  # type: ignore[arg-type]
    for host in HOSTS:
        try:
            control += (await open_fetcher.fetch(f"http://{host}/", Filters())).body == b"secret"
        except FetchError as error:
            print(host, error, file=sys.stderr)
    await open_fetcher.aclose()
    for server in servers:
        server.close()
    print(json.dumps({"refused": refused, "packets": sent, "connections": reached, "control": control}))


asyncio.run(main())
