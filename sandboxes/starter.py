"""From a session without a sandbox to one that is idle: admission, the pool or a launch, the ticket.

Above: `calls`, `files`. Below: `keeper`, `pool`, `sandbox`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

from sandboxes.backends.base import Life
from sandboxes.errors import ChannelLost, EngineUnavailable, NoCapacity, StateLost
from sandboxes.joining import Joining
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import LIVE, OVER, Phase, Transition
from sandboxes.pool import Pool
from sandboxes.sandbox import Sandbox, describe
from sandboxes.session import Session
from sandboxes.stores.base import SessionRecord

STARTS = 3  # tries, where a node may be lost while its sandbox starts


class SessionOver(Exception):
    """The session closed under a call that waited: the call goes on in a new one."""


class Starter:
    """Its callers hold the session's turn."""

    def __init__(self, keeper: Keeper, pool: Pool, joining: Joining | None = None) -> None:
        """`joining`: where several hosts share sandboxes."""
        self._keeper = keeper
        self._pool = pool
        self._joining = joining

    async def ensure(self, session: Session, on_wait: Callable[[int], None]) -> Sandbox:
        """The session's sandbox, connected; started where there is none, or where the last one died.

        Raises SessionOver, NoCapacity, EngineUnavailable and what else `launch` names, ChannelLost.
        """
        sandbox = session.sandbox if self._joining is None else self._joining.newest(session)
        if sandbox is not None and session.phase in LIVE:
            if sandbox.connected:
                return sandbox
            try:
                await self._connect(session, sandbox)
            except StateLost as error:
                await self._keeper.records.looked(session, error)
                if session.phase in OVER:
                    raise SessionOver from None
                if session.phase in LIVE and session.sandbox is sandbox:
                    self._keeper.lose(session, f"the sandbox is gone: {error.message}", error=error)
            else:
                return sandbox
        return await self._start(session, on_wait)

    async def reached(self, session: Session) -> Sandbox | None:
        """The session's sandbox, connected, if it has one; starts none. Raises StateLost, EngineUnavailable, …"""
        sandbox = session.sandbox if self._joining is None else self._joining.newest(session)
        if sandbox is not None and session.phase in LIVE and not sandbox.connected:
            await self._connect(session, sandbox)
        return sandbox

    def examine_when_lost(self, session: Session, sandbox: Sandbox) -> None:
        """From now on, a connection that ends by itself has the engine asked whether the sandbox lives."""

        def lost() -> None:
            if session.sandbox is sandbox:
                self._keeper.spawn(self.examine(session, sandbox), "examine")

        sandbox.on_lost = lost

    async def examine(self, session: Session, sandbox: Sandbox) -> None:
        """Loses the session's sandbox when the engine says that it has ended; a running call sees to it itself."""
        lost: StateLost | None = None
        try:
            status = await sandbox.status()
        except StateLost as error:
            lost, why = error, error.message
        else:
            if status.life is Life.RUNNING:
                return
            why = describe(status)
        if session.sandbox is sandbox and session.phase is Phase.IDLE:
            await self._keeper.records.looked(session, lost or StateLost(why))
        if session.sandbox is sandbox and session.phase is Phase.IDLE:
            self._keeper.lose(session, f"the sandbox is gone: {why}", error=lost)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _start(self, session: Session, on_wait: Callable[[int], None]) -> Sandbox:
        keeper = self._keeper
        if session.disposal is not None:
            await session.disposal
            session.disposal = None
        if session.losses_open:  # else what may have run in the lost one could run again
            await keeper.settle_lost(session)
        began = time.perf_counter()
        slot = await keeper.admission.acquire(session.key.principal, on_wait)
        keeper.observer.queued(session.key, "admission", time.perf_counter() - began)
        if session.phase in OVER:
            keeper.admission.release(slot)
            raise SessionOver
        session.slot = slot
        session.change(Transition.START)
        began = time.perf_counter()
        sandbox: Sandbox | None = None
        try:
            found = None if self._joining is None else await self._joining.found(session)
            if session.phase is not Phase.STARTING:
                raise SessionOver
            if found is not None:
                sandbox, source = found, "replica"
            else:
                sandbox, source = await self._obtain(session)
                sandbox = await self._claim(session, sandbox)
            if session.phase is not Phase.STARTING:
                raise SessionOver
        except BaseException as error:
            self._failed(session, sandbox, error)
            raise
        session.sandbox = sandbox
        session.change(Transition.READY, source)
        self.examine_when_lost(session, sandbox)
        keeper.busy_ids.discard(sandbox.handle.sandbox_id)
        keeper.observer.sandbox_started(session.key, source, time.perf_counter() - began)
        keeper.save_soon(session)
        return sandbox

    async def _claim(self, session: Session, sandbox: Sandbox) -> Sandbox:
        """Binds a sandbox to the session. Returns the session's: another host may have been faster."""
        if self._joining is None:
            return await self._bind(session, sandbox)
        for _ in range(STARTS):
            try:
                return await self._bind(session, sandbox)
            except (StateLost, ChannelLost) as error:  # its node went, or it was swept, in this very moment
                self._keeper.observer.failed("start", error)
                await sandbox.close()
            if session.phase is not Phase.STARTING:
                raise SessionOver
            sandbox, _ = await self._obtain(session)
        raise EngineUnavailable("sandboxes started and were lost before they could be reached")

    async def _bind(self, session: Session, sandbox: Sandbox) -> Sandbox:
        client = await sandbox.client()
        if self._joining is not None:
            await self._joining.know_epoch(session)
        epoch = session.record.epoch + 1
        ticket = self._keeper.owner.ticket(sandbox.handle.sandbox_id, session.claim)
        await client.claim(ticket, session.claim, epoch, session.record.sequence)
        if self._joining is not None:
            return await self._joining.commit(session, sandbox, epoch)
        session.update(epoch=epoch, handle=sandbox.handle, workspace=sandbox.handle.workspace)
        return sandbox

    async def _connect(self, session: Session, sandbox: Sandbox) -> None:
        if self._joining is None:
            await sandbox.client()
            return
        await self._joining.connect(session, sandbox)
        if sandbox.on_lost is None:
            self.examine_when_lost(session, sandbox)

    async def _obtain(self, session: Session) -> tuple[Sandbox, str]:
        keeper = self._keeper
        if session.record.workspace is None:
            if (sandbox := self._pool.take() or await self._pool.give_way()) is not None:
                keeper.busy_ids.add(sandbox.handle.sandbox_id)
                return sandbox, "pool"
        elif (surplus := await self._pool.give_way()) is not None:  # its files are elsewhere: it needs its own
            await keeper.destroy(surplus)
        name = launch_key(session)
        workspace = session.record.workspace or name
        keeper.busy_ids.add(name)
        try:
            await keeper.undo_doomed(name)
            handle = await keeper.engine.launch(name, keeper.settings.spec, workspace)
            keeper.busy_ids.add(handle.sandbox_id)
        except NoCapacity as error:
            if error.message.startswith("at capacity"):
                raise
            raise NoCapacity(f"at capacity: {error.message}", retry_after_s=error.retry_after_s) from None
        finally:
            keeper.busy_ids.discard(name)
        return Sandbox(keeper.engine, handle), "launch"

    def _failed(self, session: Session, sandbox: Sandbox | None, error: BaseException) -> None:
        keeper = self._keeper
        if not isinstance(error, SessionOver):
            keeper.observer.failed("start", error)
        if session.phase is Phase.STARTING:
            session.change(Transition.START_FAILED, type(error).__name__)
        shared = self._joining is not None and sandbox is not None and sandbox.handle.key == launch_key(session)
        if sandbox is None:
            keeper.release(session)
        elif shared and session.phase not in OVER:  # another host may have the same one; the next start finds it again
            keeper.busy_ids.discard(sandbox.handle.sandbox_id)
            keeper.spawn(sandbox.close(), "disconnect")
            keeper.release(session)
        else:
            slot, session.slot = session.slot, None
            kept = session.record.workspace is not None and session.phase not in OVER
            keeper.busy_ids.discard(sandbox.handle.sandbox_id)

            async def undo() -> None:
                await keeper.destroy(sandbox, keep_workspace=kept)
                if slot is not None:
                    keeper.admission.release(slot)

            session.disposal = asyncio.create_task(undo(), name="undo-start")
        keeper.save_soon(session)


def launch_key(session: Session) -> str:
    """What an incarnation of a session is launched under, and its workspace named: the same from any host."""
    return workspace_name(session.record)


def workspace_name(record: SessionRecord) -> str:
    """See `launch_key`."""
    text = f"{record.key}\n{record.incarnation}"
    return "s-" + hashlib.sha256(text.encode()).hexdigest()[:32]
