"""Names to addresses, the system's way, in threads of its own: names that never resolve must not hold up other work."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult

THREADS = 16


class SystemResolver(AbstractResolver):
    """What `getaddrinfo` says, /etc/hosts and search domains included. What it gives is checked by the guard."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of `host`. Raises OSError."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        )
        return [
            ResolveResult(
                hostname=host, host=_text(address), port=port, family=kind, proto=protocol, flags=socket.AI_NUMERICHOST
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Let the threads end; one that still waits for a name is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _text(address: tuple[str | int, ...] | tuple[str, int] | tuple[int, bytes]) -> str:
    """The address of a socket address, with the scope a link-local one has: the guard refuses both."""
    host = str(address[0])
    return f"{host}%{address[3]}" if len(address) == 4 and address[3] else host
