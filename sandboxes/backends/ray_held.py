"""What a node knows of the leases that are at it, and whether it can be sure of one.

Above: `ray_node`. Below: nothing.

The head takes a node's leases away when the node has not answered its health checks for a while. A node that is cut off
hears nothing of that, and for seconds after its link is back it still does not: so it must know by itself that it may
have been given up. Whoever comes to it meanwhile is told that it is not sure, and asks the head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

# The head is asked every `sweep_s`. What it said is relied on for so many sweeps, 3 s, which is less than it takes the
# head to give up a node (5 s as docs/cluster.md has it), and more than the pause between two rounds.
SURE_SWEEPS = 1.5


class Held:
    """`sweep_s`: how often the head is asked. Times are those of the monotonic clock."""

    def __init__(self, sweep_s: float) -> None:
        self._relied_s = SURE_SWEEPS * sweep_s
        self._asked: float | None = None
        self._workspaces: frozenset[str] = frozenset()
        self._launched: dict[str, float] = {}

    def told(self, held: Mapping[str, str], asked: float) -> None:
        """`held`: all leases that the head has at this node. `asked`: when it was asked, not when it answered: what was
        long on its way says nothing of now."""
        self._asked, self._workspaces = asked, frozenset(held)
        self._launched = {name: at for name, at in self._launched.items() if at >= asked}

    def launched(self, workspace: str) -> None:
        """Somebody has come with a lease that the head has just placed here."""
        self._launched[workspace] = time.monotonic()

    def surely(self, workspace: str) -> bool:
        """Whether the workspace's lease is at this node beyond doubt."""
        if self._asked is None or time.monotonic() - self._asked > self._relied_s:
            return False
        return workspace in self._workspaces or workspace in self._launched
