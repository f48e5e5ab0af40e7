"""Consent to hosted calls: what was asked is stored, and an answer executes the stored call exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from toolhost.loop.errors import ApprovalError


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """A call that waits. `arguments` is the JSON text that will be executed, whatever a client sends back."""

    id: str
    principal: str
    task: str
    namespace: str
    tool: str
    call_id: str
    arguments: str


class ApprovalStore(Protocol):
    """Where open requests are kept; a gateway brings one that survives restarts."""

    async def put(self, pending: PendingApproval) -> None: ...

    async def take(self, approval_id: str, principal: str) -> PendingApproval:
        """Remove and return a request, atomically: only one taker ever gets it.

        Raises ApprovalError if it is unknown, taken, or another principal's.
        """
        ...

    async def peek(self, approval_id: str, principal: str) -> PendingApproval:
        """Like `take`, but leaves it there."""
        ...


class MemoryApprovals:
    """Open requests of one process."""

    def __init__(self) -> None:
        self._open: dict[str, PendingApproval] = {}

    async def put(self, pending: PendingApproval) -> None:
        self._open[pending.id] = pending

    async def take(self, approval_id: str, principal: str) -> PendingApproval:
        pending = await self.peek(approval_id, principal)
        del self._open[approval_id]
        return pending

    async def peek(self, approval_id: str, principal: str) -> PendingApproval:
        pending = self._open.get(approval_id)
        if pending is None or pending.principal != principal:
            raise ApprovalError(approval_id)
        return pending
