"""On the edge of a cluster: the same sandboxes by the local backend and by the cluster's, in turns. Prints JSON.

Arguments: the directory of `tests.sandboxes.backends.ray_host`, how many launches, how many calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from sandboxes.backends.base import Backend
from sandboxes.client import AgentClient, Bound
from sandboxes.spec import Handle, PythonCall
from tests.sandboxes.backends import bubblewrap_host, ray_host

BLOCK = 25


async def first_result(backend: Backend, key: str) -> tuple[float, Handle]:
    """From nothing to the first result of Python."""
    began = time.perf_counter()
    handle = await backend.launch(key, ray_host.SMALL, key)
    client = await connected(backend, handle)
    await call(client, 1)
    took = time.perf_counter() - began
    await client.close()
    return took, handle


async def connected(backend: Backend, handle: Handle) -> AgentClient:
    client = await AgentClient.connect(await backend.connect(handle))
    await client.claim("t" * 64, "p/request/s", 1, 0)
    return client


async def call(client: AgentClient, number: int) -> None:
    ident = f"a-{number}"
    outcome = await client.execute(ident, "0" * 64, PythonCall("1+1"), Bound(30), cap=1000, queued_at=0.0)
    assert outcome.value == "2", outcome
    client.acknowledge([ident])


async def main(directory: Path, launches: int, calls: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        local = bubblewrap_host.Host.make(Path(own), 0).backend()
        backends: dict[str, Backend] = {"local": local, "cluster": ray_host.Host(directory).backend()}
        starts: dict[str, list[float]] = {name: [] for name in backends}
        took: dict[str, list[float]] = {name: [] for name in backends}
        for backend in backends.values():
            await backend.open()
        for number in range(launches):
            for name, backend in backends.items():
                seconds, handle = await first_result(backend, f"k-{number}")
                starts[name].append(seconds)
                await backend.destroy(handle)
        handles = {name: await backend.launch("k", ray_host.SMALL, "k") for name, backend in backends.items()}
        clients = {name: await connected(backend, handles[name]) for name, backend in backends.items()}
        for block in range(calls // BLOCK):
            for name, client in clients.items():
                for number in range(BLOCK):
                    began = time.perf_counter()
                    await call(client, block * BLOCK + number)
                    took[name].append(time.perf_counter() - began)
        for name, backend in backends.items():
            await clients[name].close()
            await backend.destroy(handles[name])
            await backend.close()
    print(json.dumps({"start": starts, "call": took}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
