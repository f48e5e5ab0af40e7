"""The cluster backend in a process on the edge, moved by its test: lines of JSON in and out (`tests.cluster.driving`).

Arguments: the directory of `ray_host`, and `unused_s` of its nodes' settings.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sandboxes.backends.ray import RayBackend
from sandboxes.backends.ray_names import lease_name, loaded, stored
from sandboxes.client import AgentClient
from tests.sandboxes.backends import ray_host

AT_ONCE = 12


class Replica:
    def __init__(self, directory: Path, unused_s: float) -> None:
        settings = ray_host.Host(directory).settings(ray_host.OWNER, unused_s=unused_s)
        self.backend = RayBackend(owner=ray_host.OWNER, node=settings)
        self.leases_asked: set[str] = set()

    async def open(self) -> None:
        await self.backend.open()

    async def launch(self, key: str) -> Any:
        self.leases_asked.add(key)
        return stored(await self.backend.launch(key, ray_host.SMALL, key))

    async def launch_all(self, keys: list[str]) -> Any:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(key: str) -> Any:
            async with gate:
                return await self.launch(key)

        return await asyncio.gather(*(one(key) for key in keys))

    async def connect(self, handle: Any) -> Any:
        client = await AgentClient.connect(await self.backend.connect(loaded(handle)))
        await client.close()
        return client.hello.sandbox

    async def destroy_all(self) -> None:
        handles = await self.backend.list_owned()
        await asyncio.gather(*(self.backend.destroy(handle) for handle in handles))

    async def owned(self) -> Any:
        return [stored(handle) for handle in await self.backend.list_owned()]

    async def drain(self, node: str, draining: bool) -> None:
        await self.backend.drain(node, draining=draining)

    async def lease(self, key: str) -> Any:
        """The lease alone, as when a replica dies before its launch."""
        return (await self.backend._leases.lease(lease_name(ray_host.OWNER.id, key))).node

    async def leases(self) -> Any:
        """The leases there are, of those that tests take here."""
        keys = sorted({*self.leases_asked, "left"})
        found = [await self.backend._leases.find(lease_name(ray_host.OWNER.id, key)) for key in keys]
        return [key for key, lease in zip(keys, found, strict=True) if lease is not None]


async def serve(replica: Replica) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def perform(request: dict[str, Any]) -> None:
        try:
            answer = {"ok": await getattr(replica, request["op"])(**request["args"])}
        except Exception as error:  # noqa: BLE001
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({"id": request["id"], **answer}), flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(perform(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def main() -> None:
    await serve(Replica(Path(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    asyncio.run(main())
