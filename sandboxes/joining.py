"""A session's sandbox that several hosts may reach: connecting to the one on record, and putting one on record.

Above: `starter`. Below: `keeper`, `replicas`, `sandbox`.

Two hosts that start a session's sandbox at once ask the backend for the same key, and get the same one. Where one takes
it from its pool they get two: the first that the store has as the session's is, and the other one is ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sandboxes import codec
from sandboxes.client import AgentClient
from sandboxes.errors import ChannelLost, EngineUnavailable, StateLost
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import OVER
from sandboxes.records import files_gone, lost_fate, same_node
from sandboxes.replicas import Replica
from sandboxes.sandbox import Sandbox
from sandboxes.session import Session
from sandboxes.spec import Receipt

PATIENCE_S = 5.0  # for a node's host that is being restarted: its sandboxes run on meanwhile
PAUSE_S = 0.1
RECEIPTS = 20  # newest ones that are asked for the epoch, which the record may not have yet


class Joining:
    """See the module."""

    def __init__(self, keeper: Keeper, replica: Replica) -> None:
        self._keeper = keeper
        self._replica = replica

    def newest(self, session: Session) -> Sandbox | None:
        """The sandbox that the record names: another host may have started a new one."""
        handle, sandbox = session.record.handle, session.sandbox
        if handle is not None and sandbox is not None and sandbox.handle.sandbox_id != handle.sandbox_id:
            sandbox.on_lost = None
            self._keeper.spawn(sandbox.close(), "disconnect")
            self._keeper.run_on(session, handle)
        return session.sandbox

    async def connect(self, session: Session, sandbox: Sandbox) -> None:
        """Raises StateLost when it is not this session's any more, EngineUnavailable, ChannelLost."""
        client = await self._patiently(sandbox)
        hello = client.hello
        ticket = self._keeper.owner.ticket(sandbox.handle.sandbox_id, session.claim)
        if hello.claim is None:  # whoever put it on record died before it told the agent
            await client.claim(ticket, session.claim, max(session.record.epoch, 1), session.record.sequence)
        elif hello.claim != (ticket, session.claim):
            raise StateLost("another session has its sandbox", sandbox=sandbox.handle.sandbox_id)
        else:
            epoch, sequence = max(session.record.epoch, hello.epoch), max(session.record.sequence, hello.sequence)
            if (epoch, sequence) != (session.record.epoch, session.record.sequence):
                session.update(epoch=epoch, sequence=sequence)

    async def found(self, session: Session) -> Sandbox | None:
        """Before a start: a sandbox that another host has started meanwhile, connected. Raises StoreUnavailable."""
        await self._replica.reload(session)
        session.gone, handle = "", session.record.handle
        if session.phase in OVER or handle is None:
            return None
        sandbox = Sandbox(self._keeper.engine, handle)
        try:
            await self.connect(session, sandbox)
        except StateLost as error:
            await sandbox.close()
            session.gone = handle.sandbox_id
            reason = f"the sandbox is gone: {error.message}; {lost_fate(error)}"
            session.update(lost_reason=session.record.lost_reason or reason)
            await self._keeper.settle_lost(session)
            return None
        session.unclear = True
        return sandbox

    async def know_epoch(self, session: Session) -> None:
        """The epoch and sequence that were given out last: those of receipts may be newer than the record's."""
        if session.record.epoch:
            newest = await self._keeper.store.attempts(session.key, limit=RECEIPTS)
            receipts: Sequence[Receipt] = [known.receipt for known in newest if known.receipt is not None]
            own = [receipt for receipt in receipts if receipt.session == str(session.key)]
            session.update(
                epoch=max([session.record.epoch, *(receipt.epoch for receipt in own)]),
                sequence=max([session.record.sequence, *(receipt.sequence for receipt in own)]),
            )

    async def commit(self, session: Session, sandbox: Sandbox, epoch: int) -> Sandbox:
        """Puts a sandbox that was claimed on record. Returns the session's, connected: another one, if another host was
        faster. Raises StateLost, StoreUnavailable; `session` may be over then or afterwards."""
        handle, record = sandbox.handle, session.record
        lost_reason = record.lost_reason
        if record.epoch and not same_node(record.node, handle.node):
            lost_reason = files_gone(lost_reason)
        status = await (await sandbox.client()).status()
        epoch = max(epoch, codec.count(status, "epoch"))  # who raced with this host may have told it first
        stands = await self._replica.started(
            session, handle, epoch=epoch, workspace=handle.workspace, node=handle.node, lost_reason=lost_reason
        )
        if stands is None or stands.sandbox_id == handle.sandbox_id:
            return sandbox
        await self._keeper.destroy(sandbox)
        other = Sandbox(self._keeper.engine, stands)
        await self.connect(session, other)
        return other

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _patiently(self, sandbox: Sandbox) -> AgentClient:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await sandbox.client()
            except StateLost:
                raise
            except (EngineUnavailable, ChannelLost):
                await sandbox.fate()
                if time.monotonic() >= until:
                    raise
            await self._keeper.clock.sleep(PAUSE_S)
