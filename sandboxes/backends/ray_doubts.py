"""Whether a session is still where a handle says: asked of the head where a node is not sure, or does not answer.

Above: `ray`. Below: `ray_leases`.

While the head is away nothing moves, and what runs must be reached: then a sandbox is taken for its session's. So the
head is waited for only shortly, and not at all while it owes an answer that was given up.
"""

from __future__ import annotations

import asyncio

from sandboxes.backends.ray_leases import Lease, Leases
from sandboxes.backends.ray_names import SHORT, Place, lease_name
from sandboxes.errors import SandboxError
from sandboxes.owner import Owner

HEAD_S = 2.0


class Doubts:
    def __init__(self, owner: Owner, leases: Leases) -> None:
        self._owner = owner
        self._leases = leases
        self._owed: set[asyncio.Task[Lease | None]] = set()  # questions that the head has not answered in time

    async def moved(self, workspace: str, place: Place, *, over: bool = True) -> bool:
        """Whether the head says that the session's lease is not at that place any more. In doubt it has not moved.
        `over`: the answer where there is no lease any more."""
        if not self._leases.connected or self._owed:
            return False
        asking = asyncio.create_task(self._leases.find(lease_name(self._owner.id, workspace)), name="ray doubt")
        try:
            done, _ = await asyncio.wait({asking}, timeout=HEAD_S)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        if not done:
            self._owed.add(asking)
            asking.add_done_callback(self._answered)
            return False
        try:
            lease = asking.result()
        except SandboxError:
            return False
        return over if lease is None else lease.node[:SHORT] != place.node

    async def close(self) -> None:
        owed = list(self._owed)
        for asking in owed:
            asking.cancel()
        await asyncio.gather(*owed, return_exceptions=True)

    def _answered(self, asking: asyncio.Task[Lease | None]) -> None:
        """Too late for who asked; others may ask again."""
        self._owed.discard(asking)
        if not asking.cancelled():
            asking.exception()
