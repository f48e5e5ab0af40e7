"""The tool host's end of the bridge to Ray: leases and nodes, each call with a deadline.

Above: `ray`. Below: the process of `ray_bridge`, which is started again, with growing pauses, when it ends. While it
is not there, every call raises EngineUnavailable at once, with what Ray said last.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandboxes.backends import ray_wire
from sandboxes.backends.ray_names import NodeSettings, plain
from sandboxes.errors import EngineUnavailable, IsolationUnavailable, SandboxError

log = logging.getLogger(__name__)

START_S = 45.0
CALL_S = 12.0
LEASE_S = 30.0
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
MAX_LINE = 32 << 20
LINES_KEPT = 20
BRIDGE = (sys.executable, "-P", "-m", "sandboxes.backends.ray_bridge")


@dataclass(frozen=True, slots=True)
class Lease:
    """A session's lease. `node`: Ray's id of where it is, "" while it is on its way."""

    id: str
    node: str
    fresh: bool = False


class Leases:
    """`environment`: variables for the bridge's process, beside this one's own (Ray's token and its mode)."""

    def __init__(
        self,
        *,
        address: str,
        namespace: str,
        owner_id: str,
        settings: NodeSettings,
        environment: Mapping[str, str],
    ) -> None:
        self._start = {
            "address": address,
            "namespace": namespace,
            "owner_id": owner_id,
            "settings": plain(dataclasses.asdict(settings)),
        }
        self._environment = dict(environment)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._lived = False
        self._admitted = False
        self._said: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._why: SandboxError = EngineUnavailable("the connection to Ray is being made; try again")

    @property
    def connected(self) -> bool:
        return self._ready.is_set()

    async def open(self) -> None:
        """Raises IsolationUnavailable (no Ray here), EngineUnavailable (no cluster, or one that refuses this host)."""
        self._running = asyncio.create_task(self._run(), name="ray bridge")
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({waiting, self._running}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self._ready.is_set():
            await self.close()
            raise self._why

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def nodes(self, again: Sequence[str] = (), *, renew: bool = False) -> list[dict[str, Any]]:
        """The nodes that take sessions. `again`: ids of those that must be asked anew where they are. `renew`: a
        NodeHost that has other settings than these is replaced; its sandboxes live on."""
        found = await self._call("nodes", CALL_S, again=list(again), renew=renew)
        return [node for node in found if isinstance(node, dict)]

    async def dead(self, nodes: Sequence[str]) -> list[str]:
        """Those of the nodes, by id, that the head has declared dead."""
        return [str(node) for node in await self._call("dead", CALL_S, nodes=list(nodes))]

    async def lease(self, name: str, avoid: Sequence[str] = ()) -> Lease:
        """Raises NoCapacity, LeaseGone (ask again), EngineUnavailable."""
        found = await self._call("lease", LEASE_S, name=name, avoid=list(avoid))
        return Lease(found["lease"], found["node"], found["fresh"])

    async def find(self, name: str) -> Lease | None:
        found = await self._call("find", CALL_S, name=name)
        return None if found is None else Lease(found["lease"], found["node"])

    async def remove(self, lease: str) -> None:
        await self._call("remove", CALL_S, lease=lease)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _call(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        if not self._ready.is_set():
            raise self._why
        return await self._ask(op, deadline_s, **arguments)

    async def _ask(self, op: str, deadline_s: float, **arguments: Any) -> Any:
        writer = self._writer
        if writer is None:
            raise self._why
        ident = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[ident] = answer
        try:
            writer.write(ray_wire.frame({"id": ident, "op": op, "args": arguments}))
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise EngineUnavailable(
                f"the Ray cluster does not answer (nothing within {deadline_s:g} s): sessions that run go on, and new "
                "ones wait until its head is back"
            ) from None
        finally:
            self._waiting.pop(ident, None)

    async def _run(self) -> None:
        """Keeps a bridge running. Ends only when there can be none here, or the cluster never took this host."""
        failures = 0
        while True:
            try:
                await self._live()
            except IsolationUnavailable as error:
                self._why = error
                return
            except SandboxError as error:
                self._why = error
                if isinstance(error, ray_wire.NotAdmitted) and not self._admitted:
                    return
                log.warning("%s", error.message)  # the cluster may be getting another token just now
            if self._lived:
                failures, self._lived = 0, False
                log.warning("the bridge to Ray has ended (%s); it is started again", self._last_words())
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    async def _live(self) -> None:
        """One life of the bridge."""
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, **self._environment}
            try:
                process = await asyncio.create_subprocess_exec(
                    *BRIDGE,
                    str(theirs.fileno()),
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # an interrupt of the tool host is not its
                )
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):
                    raise EngineUnavailable(f"the bridge to Ray cannot be started: {error}") from None
                raise
        listening = asyncio.create_task(self._listen(process.stderr))
        reading: asyncio.Task[None] | None = None
        starting: asyncio.Task[Any] | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
            reading = asyncio.create_task(self._read(reader))
            starting = asyncio.create_task(self._ask("start", START_S, **self._start))
            await asyncio.wait({reading, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise EngineUnavailable(f"the bridge to Ray has ended: {self._last_words()}")
            starting.result()
            self._ready.set()
            self._lived = self._admitted = True
            await reading
        finally:
            if self._ready.is_set():
                self._ready.clear()
                self._why = EngineUnavailable("the connection to the Ray cluster is lost and is being made anew")
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EngineUnavailable("the connection to the Ray cluster is lost; try again"))
            self._waiting.clear()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            tasks = [task for task in (reading, listening, starting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                fields = json.loads(line)
                waiting = self._waiting.get(fields.get("id"))
            except (ValueError, AttributeError):
                log.warning("the bridge to Ray says what is not of its protocol: it is started again")
                return
            if waiting is None or waiting.done():
                continue
            if "error" in fields:
                waiting.set_exception(ray_wire.read_error(fields))
            else:
                waiting.set_result(fields.get("ok"))

    async def _listen(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while piece := await stream.read(4096):
            self._said.extend(line[:300] for line in piece.decode(errors="replace").splitlines() if line.strip())

    def _last_words(self) -> str:
        return self._said[-1] if self._said else "it said nothing"
