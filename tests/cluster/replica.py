"""A tool host's insides on the edge, moved by its test: lines of JSON in, lines of JSON out (`tests.cluster.driving`).

Arguments: the directory of `ray_host`, and the ledger's file, or "" for a backend without a manager.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from sandboxes.backends.base import Backend
from sandboxes.backends.ray_names import lease_name, loaded, stored
from sandboxes.client import AgentClient
from sandboxes.manager import SessionManager
from sandboxes.settings import ManagerSettings
from sandboxes.spec import Execution, PythonCall
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.host import attach, text_of
from tests.sandboxes.backends import ray_host

UNUSED_S = 6.0


class Replica:
    def __init__(self, directory: Path, ledger: str) -> None:
        settings = ray_host.Host(directory).settings(ray_host.OWNER, unused_s=UNUSED_S)
        self.backend: Any = ray_host.RayBackend(owner=ray_host.OWNER, node=settings)
        self.manager: SessionManager | None = None
        if ledger:
            backend: Backend = self.backend
            self.manager = SessionManager(
                backend=backend,
                store=SqliteStore(Path(ledger)),
                owner=ray_host.OWNER,
                settings=ManagerSettings(spec=ray_host.SMALL, grace_step_s=ray_host.GRACE_S, max_sessions=10_000),
            )

    async def open(self) -> None:
        await (self.manager.open() if self.manager is not None else self.backend.open())

    async def close(self) -> None:
        await (self.manager.close() if self.manager is not None else self.backend.close())

    # --- of the backend

    async def launch(self, key: str) -> Any:
        return stored(await self.backend.launch(key, ray_host.SMALL, key))

    async def launch_all(self, keys: list[str]) -> Any:
        gate = asyncio.Semaphore(12)

        async def one(key: str) -> Any:
            async with gate:
                return await self.launch(key)

        found = await asyncio.gather(*(one(key) for key in keys), return_exceptions=True)
        return [it if isinstance(it, dict) else f"{type(it).__name__}: {it}" for it in found]

    async def lookup(self, key: str) -> Any:
        handle = await self.backend.lookup(key)
        return None if handle is None else stored(handle)

    async def connect(self, handle: Any) -> Any:
        client = await AgentClient.connect(await self.backend.connect(loaded(handle)))
        await client.close()
        return client.hello.sandbox

    async def poll(self, handle: Any) -> Any:
        return (await self.backend.poll(loaded(handle))).life.value

    async def destroy(self, handle: Any) -> None:
        await self.backend.destroy(loaded(handle))

    async def destroy_all(self) -> None:
        handles = await self.backend.list_owned()
        await asyncio.gather(*(self.backend.destroy(handle) for handle in handles))

    async def owned(self) -> Any:
        return [stored(handle) for handle in await self.backend.list_owned()]

    async def nodes(self) -> Any:
        await self.backend._nodes.refresh_soon()
        return [[info.host, info.sandboxes, info.draining, info.problem] for info in self.backend.nodes()]

    async def drain(self, node: str, draining: bool) -> None:
        await self.backend.drain(node, draining=draining)

    async def lease(self, key: str) -> Any:
        """The lease alone, as when a replica dies before its launch."""
        return (await self.backend._leases.lease(lease_name(ray_host.OWNER.id, key))).node

    async def find(self, key: str) -> Any:
        lease = await self.backend._leases.find(lease_name(ray_host.OWNER.id, key))
        return None if lease is None else lease.node

    async def bridge(self) -> Any:
        return [self.backend._leases.connected, self.backend.head_answers]

    # --- of the manager

    async def run(self, session: str, code: str, timeout_s: float = 30.0) -> Any:
        assert self.manager is not None
        began = time.monotonic()
        outcome = await attach(self.manager, session).run(Execution(PythonCall(code), timeout_s=timeout_s))
        receipt = outcome.receipt
        return {
            "text": text_of(outcome),
            "ending": receipt.ending.value,
            "epoch": receipt.epoch,
            "lost": outcome.state_lost_before,
            "notes": list(outcome.notes),
            "took_s": time.monotonic() - began,
            "ended": time.time(),
        }

    async def handle_of(self, session: str) -> Any:
        assert self.manager is not None
        found = self.manager._keeper.sessions[attach(self.manager, session).key]
        return None if found.record.handle is None else stored(found.record.handle)


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
    replica = Replica(Path(sys.argv[1]), sys.argv[2])
    await serve(replica)


if __name__ == "__main__":
    asyncio.run(main())
