"""Tells nodes that the head has declared dead, and that can be reached again, that they are over.

Above: `ray_nodes`. Below: `ray_peer`.

Ray on a node whose link was lost ends when it hears from the head that it is dead. That can take far longer than the
link was lost, as its connection to the head is the one of before, whose pauses between two tries have grown with the
time (35 s after 20 s without a link). A tool host knows it at once, and makes a new connection every second.
"""

from __future__ import annotations

import asyncio
import logging

from sandboxes.backends.ray_names import Place
from sandboxes.backends.ray_peer import Peer, Unreachable
from sandboxes.errors import EngineUnavailable, SandboxError
from sandboxes.owner import Owner

log = logging.getLogger(__name__)

END_S = 60.0
PAUSE_S = 1.0


class Over:
    """`patience_s`: a node that was without the head for so long has ended its sandboxes by itself."""

    def __init__(self, owner: Owner, patience_s: float) -> None:
        self._owner = owner
        self._patience_s = patience_s
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, place: Place) -> None:
        task = asyncio.create_task(self._tell(place), name="ray over")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        telling = list(self._telling)
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)

    async def _tell(self, place: Place) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while loop.time() < deadline:
            peer = Peer(self._owner, place)
            try:
                await peer.call("over", END_S)
                log.warning("the node %s was told that it is over: its sandboxes are ended", place)
                return
            except EngineUnavailable as error:
                if isinstance(error, Unreachable) and error.refused:
                    return  # its NodeHost has ended: its sandboxes do, by their fence
            except SandboxError:
                return  # it has been started anew
            finally:
                await peer.close()
            await asyncio.sleep(PAUSE_S)
