"""A session's named resources other than its sandbox: made on first use, opaque to it, closed and stored with it.

Above: namespaces (a browser state is one). Below: the standard library.
"""

from __future__ import annotations

from typing import Protocol


class Resource(Protocol):
    """What a session keeps under a name."""

    def state(self) -> bytes | None:
        """What to store so that a restarted host can make it again; None when nothing is worth keeping."""

    async def close(self) -> None:
        """Called once, when the session closes. Never raises."""


class ResourceFactory(Protocol):
    """Makes a resource, from its stored state when there is one."""

    def __call__(self, state: bytes | None) -> Resource: ...
