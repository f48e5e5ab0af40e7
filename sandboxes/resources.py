"""A session's named resources other than its sandbox: made on first use, opaque to it, closed and stored with it.

Above: namespaces (a browser state is one). Below: the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Resource(Protocol):
    """What a session keeps under a name."""

    def changes(self) -> Mapping[str, bytes | None]:
        """What to store so that a restarted host can make it again: the parts that are not stored as they are, by a
        name that means something to it alone; None removes one. They are stored together."""

    async def close(self) -> None:
        """Called once, when the session closes. Never raises."""


class ResourceFactory(Protocol):
    """Makes a resource from its stored parts; there are none at first."""

    def __call__(self, parts: Mapping[str, bytes], /) -> Resource: ...
