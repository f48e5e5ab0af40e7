"""What a tool host knows of the cluster's nodes, asked of the head now and then, and kept while that is away.

Above: `ray`. Below: `ray_leases` (the head), `ray_peer` (the nodes), `ray_over` (those that are over).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sandboxes.backends.base import Problem
from sandboxes.backends.ray_leases import Leases
from sandboxes.backends.ray_names import RESOURCE, SHORT, STARTING, NodeInfo, Place
from sandboxes.backends.ray_over import Over
from sandboxes.backends.ray_peer import Peer, Unreachable
from sandboxes.backends.ray_wire import NotReady
from sandboxes.errors import BackendError, EngineUnavailable, IsolationUnavailable, NodeGone, SandboxError
from sandboxes.owner import Owner

log = logging.getLogger(__name__)

REFRESH_S = 2.0
SOON_S = 0.3
OPEN_S = 40.0
START_PAUSE_S = 0.1
STATUS_S = 3.0
LOOK_S = 8.0
PAUSE_S = 0.1
KNOCK_S = 0.5
FORGET = 1000  # lives of nodes that are over are remembered, so many


@dataclass(frozen=True, slots=True)
class Entry:
    """One node that takes sessions. `raylet`: the port of Ray's own process there. `place` is None until its NodeHost
    has said where its relay is."""

    id: str
    host: str
    raylet: int
    capacity: int
    place: Place | None
    problem: str
    draining: bool = False
    sandboxes: int = 0
    differences: frozenset[str] = frozenset()
    versions: Mapping[str, str] = field(default_factory=dict)


class Nodes:
    """`fresh`: whether the head has answered the last time. `patience_s`: how long a node is without it at most."""

    def __init__(self, owner: Owner, leases: Leases, patience_s: float) -> None:
        self._owner = owner
        self._leases = leases
        self._entries: dict[str, Entry] = {}
        self._seen: dict[str, tuple[str, int]] = {}  # host and raylet's port of every life of a node, by short id
        self._peers: dict[Place, Peer] = {}
        self._lives: dict[str, Place] = {}  # where each node was last, by id, until the head does not name it any more
        self._over = Over(owner, patience_s)
        self._task: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._renew = False
        self.fresh = False

    async def open(self, *, launching: bool = True) -> None:
        """Waits until the nodes there are have started, or say why they cannot.

        Raises EngineUnavailable, and with `launching` IsolationUnavailable when none of them can.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + OPEN_S
        self._renew = launching
        while True:
            await self.refresh()
            waiting = [entry for entry in self._entries.values() if entry.place is None or entry.problem == STARTING]
            if not waiting or loop.time() >= deadline:
                break
            await asyncio.sleep(START_PAUSE_S)
        self._renew = False  # once: hosts with different settings must not go on replacing each other's
        problems = [entry.problem for entry in self._entries.values() if entry.problem]
        if launching and problems and len(problems) == len(self._entries):
            raise IsolationUnavailable(f"no node of the cluster takes sessions: {problems[0]}")
        for problem in problems:
            log.warning("%s", problem)
        if not self._entries:
            log.warning("no node of the cluster has the resource %s: sessions wait for one", RESOURCE)
        self._task = asyncio.create_task(self._keep(), name="ray nodes")

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._refreshing) if task is not None]
        self._task = self._refreshing = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._over.close()
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def differences(self) -> frozenset[str]:
        """What any of the nodes does not give."""
        return frozenset().union(*(entry.differences for entry in self._entries.values()))

    def infos(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                node=str(entry.place) if entry.place is not None else f"{entry.host}/{entry.id[:SHORT]}",
                host=entry.host,
                alive=not entry.problem,
                draining=entry.draining,
                capacity=entry.capacity,
                sandboxes=entry.sandboxes,
                problem=entry.problem,
                versions=entry.versions,
            )
            for entry in sorted(self._entries.values(), key=lambda entry: (entry.host, entry.id))
        ]

    def closed(self) -> set[str]:
        """Ids of nodes that take no new sessions, as far as is known."""
        return {entry.id for entry in self._entries.values() if entry.draining or entry.problem}

    def named(self, text: str) -> Entry:
        """The node with this address, or whose id begins so. Raises BackendError."""
        wanted = text.rpartition("/")[2]
        found = [e for e in self._entries.values() if wanted and (e.host == text or e.id.startswith(wanted))]
        if len(found) != 1:
            known = ", ".join(f"{entry.host}/{entry.id[:SHORT]}" for entry in self._entries.values()) or "none"
            raise BackendError(f"{'no' if not found else 'more than one'} node {text!r:.80}; there are: {known}")
        return found[0]

    async def entry(self, node_id: str) -> Entry | None:
        """A node by Ray's id, also one that has just come; None when the head does not know it as alive."""
        found = self._entries.get(node_id)
        if found is None or found.place is None:
            with contextlib.suppress(SandboxError):
                await self.refresh()
            found = self._entries.get(node_id)
        return found

    async def gone(self, place: Place, *, refused: bool = True) -> bool:
        """Whether a node, of which nobody answers at its relay, is known to be gone.

        Its machine says so itself, when nothing listens at the ports of its relay and of Ray any more (a NodeHost alone
        that has died is back soon); or the head does.
        """
        if self.over(place):
            return True
        seen = self._seen.get(place.node)
        return refused and seen is not None and await _refused(*seen)

    def over(self, place: Place) -> bool:
        """Whether the head has given up a node that this host has seen."""
        if not self.fresh or place.node not in self._seen:
            return False
        return not any(ident.startswith(place.node) for ident in self._entries)

    # --- asking ------------------------------------------------------------------------------------------------------

    def peer(self, place: Place) -> Peer:
        if place not in self._peers:
            self._peers[place] = Peer(self._owner, place)
        return self._peers[place]

    async def ask(self, entry: Entry, op: str, deadline_s: float, **arguments: Any) -> Any:
        if entry.place is None:
            raise EngineUnavailable(f"the node {entry.host} has not started yet: {entry.problem}")
        return await self.peer(entry.place).call(op, deadline_s, **arguments)

    async def ask_all(self, op: str, deadline_s: float, **arguments: Any) -> list[Any]:
        """What every node says. One that is gone, or has said that it takes no sessions, says nothing; one that does
        not answer is waited for a while.

        Raises EngineUnavailable.
        """
        if not self._entries and not self.fresh:
            await self.refresh()
        entries = [entry for entry in self._entries.values() if entry.place is not None]
        answers = await asyncio.gather(*(self._ask_one(entry, op, deadline_s, **arguments) for entry in entries))
        return [answer for known, answer in answers if known]

    async def _ask_one(self, entry: Entry, op: str, deadline_s: float, **arguments: Any) -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOOK_S
        while True:
            try:
                return True, await self.ask(entry, op, deadline_s, **arguments)
            except NodeGone:
                return False, None
            except (Unreachable, NotReady) as error:
                assert entry.place is not None
                if isinstance(error, Unreachable) and await self.gone(entry.place, refused=error.refused):
                    return False, None
                if loop.time() >= deadline:
                    raise
            except EngineUnavailable:
                if entry.problem in ("", STARTING):
                    raise
                return False, None
            await asyncio.sleep(PAUSE_S)

    async def problems(self) -> list[Problem]:
        """For `doctor`. `open` has succeeded."""
        if not self._entries:
            mend = f"start Ray on a node with `toolhost cluster up`, or with --resources='{{\"{RESOURCE}\": 100}}'"
            return [Problem(f"no node of the Ray cluster has the resource {RESOURCE}", mend, fatal=True)]
        found = []
        for entry in list(self._entries.values()):
            if entry.problem or entry.place is None:
                found.append(Problem(f"node {entry.host}: {entry.problem}", "run `toolhost doctor` on that node"))
                continue
            try:
                said = await self.ask(entry, "probe", LOOK_S)
            except BackendError as error:
                found.append(Problem(f"node {entry.host}: {error.message}", "see the node's logs of Ray"))
                continue
            found += [
                Problem(f"node {entry.host}: {problem['what']}", str(problem["mend"]), bool(problem["fatal"]))
                for problem in said
            ]
        return found

    # --- refreshing --------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Asks the head; those that want it at once share one answer. Raises EngineUnavailable."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="ray refresh")
            self._refreshing.add_done_callback(_seen)
        await asyncio.shield(self._refreshing)

    async def refresh_soon(self) -> None:
        """As `refresh`, and raises nothing."""
        with contextlib.suppress(SandboxError):
            await self.refresh()

    async def _refresh(self) -> None:
        again = [entry.id for entry in self._entries.values() if entry.problem or entry.place is None]
        try:
            found = await self._leases.nodes(again, renew=self._renew)
        except SandboxError:
            self.fresh = False
            raise
        entries = [self._read(fields) for fields in found]
        for entry in entries:
            self._seen[entry.id[:SHORT]] = (entry.host, entry.raylet)
        while len(self._seen) > FORGET:
            del self._seen[next(iter(self._seen))]
        self._lives |= {entry.id: entry.place for entry in entries if entry.place is not None}
        # Who is there is known now; what each says of itself may take a while.
        self._entries = {entry.id: self._as_before(entry) for entry in entries}
        self.fresh = True
        self._entries = {entry.id: entry for entry in await asyncio.gather(*(self._status(e) for e in entries))}
        await self._tell_those_that_are_over()
        places = {entry.place for entry in entries}
        for place in [place for place in self._peers if place not in places]:
            await self._peers.pop(place).close()

    async def _tell_those_that_are_over(self) -> None:
        missing = [ident for ident in self._lives if ident not in self._entries]
        if not missing:
            return
        with contextlib.suppress(SandboxError):  # the next refresh asks again
            dead = await self._leases.dead(missing)
            for ident in missing:
                place = self._lives.pop(ident)
                if ident in dead:
                    self._over.tell(place)

    def _read(self, fields: dict[str, Any]) -> Entry:
        place = fields.get("place")
        return Entry(
            id=str(fields["node"]),
            host=str(fields["host"]),
            raylet=int(fields["raylet"]),
            capacity=int(fields["capacity"]),
            place=Place.parse(place) if place else None,
            problem=str(fields.get("problem") or ("" if place else "its NodeHost has not started yet")),
        )

    def _as_before(self, entry: Entry) -> Entry:
        known = self._entries.get(entry.id)
        return entry if known is None or known.place != entry.place else known

    async def _status(self, entry: Entry) -> Entry:
        if entry.place is None:
            return entry
        try:
            said = await self.ask(entry, "status", STATUS_S)
        except SandboxError as error:
            return replace(entry, problem=entry.problem or error.message)
        return replace(
            entry,
            draining=bool(said["draining"]),
            sandboxes=int(said["sandboxes"]),
            problem=str(said["problem"]),
            differences=frozenset(said["differences"]),
            versions={str(name): str(value) for name, value in said.get("versions", {}).items()},
        )

    async def _keep(self) -> None:
        told = True
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except SandboxError as error:
                if told:
                    log.warning("%s", error.message)
                told = False
            else:
                if not told:
                    log.warning("the Ray cluster answers again")
                told = True


async def _refused(host: str, port: int) -> bool:
    """Whether the machine itself says that nothing listens at a port."""
    try:
        async with asyncio.timeout(KNOCK_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def _seen(task: asyncio.Task[None]) -> None:
    """Whoever asked may be gone: the error is then nobody's."""
    if not task.cancelled():
        task.exception()
