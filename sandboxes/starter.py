"""From a session without a sandbox to one that is idle: admission, the pool or a launch, the ticket.

Above: `calls`, `files`. Below: `keeper`, `pool`, `sandbox`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

from sandboxes.backends.base import Life
from sandboxes.errors import StateLost
from sandboxes.keeper import Keeper
from sandboxes.lifecycle import LIVE, OVER, Phase, Transition
from sandboxes.pool import Pool
from sandboxes.sandbox import Sandbox, describe
from sandboxes.session import Session
from sandboxes.stores.base import SessionRecord


class SessionOver(Exception):
    """The session closed under a call that waited: the call goes on in a new one."""


class Starter:
    """Its callers hold the session's turn."""

    def __init__(self, keeper: Keeper, pool: Pool) -> None:
        self._keeper = keeper
        self._pool = pool

    async def ensure(self, session: Session, on_wait: Callable[[int], None]) -> Sandbox:
        """The session's sandbox, connected; started where there is none, or where the last one died.

        Raises SessionOver, NoCapacity, EngineUnavailable and what else `launch` names, ChannelLost.
        """
        sandbox = session.sandbox
        if sandbox is not None and session.phase in LIVE:
            if sandbox.connected:
                return sandbox
            try:
                await sandbox.client()
            except StateLost as error:
                if session.phase in LIVE:
                    self._keeper.lose(session, f"the sandbox is gone: {error.message}")
            else:
                return sandbox
        return await self._start(session, on_wait)

    def examine_when_lost(self, session: Session, sandbox: Sandbox) -> None:
        """From now on, a connection that ends by itself has the engine asked whether the sandbox lives."""

        def lost() -> None:
            if session.sandbox is sandbox:
                self._keeper.spawn(self.examine(session, sandbox), "examine")

        sandbox.on_lost = lost

    async def examine(self, session: Session, sandbox: Sandbox) -> None:
        """Loses the session's sandbox when the engine says that it has ended; a running call sees to it itself."""
        status = await sandbox.status()
        if status.life is not Life.RUNNING and session.sandbox is sandbox and session.phase is Phase.IDLE:
            self._keeper.lose(session, f"the sandbox is gone: {describe(status)}")

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
            sandbox, source = await self._obtain(session)
            client = await sandbox.client()
            epoch = session.record.epoch + 1
            ticket = keeper.owner.ticket(sandbox.handle.sandbox_id, session.claim)
            await client.claim(ticket, session.claim, epoch, session.record.sequence)
            if session.phase is not Phase.STARTING:
                raise SessionOver
        except BaseException as error:
            self._failed(session, sandbox, error)
            raise
        session.sandbox = sandbox
        session.update(epoch=epoch, handle=sandbox.handle, workspace=sandbox.handle.workspace)
        session.change(Transition.READY, source)
        self.examine_when_lost(session, sandbox)
        keeper.busy_ids.discard(sandbox.handle.sandbox_id)
        keeper.observer.sandbox_started(session.key, source, time.perf_counter() - began)
        keeper.save_soon(session)
        return sandbox

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
        finally:
            keeper.busy_ids.discard(name)
        return Sandbox(keeper.engine, handle), "launch"

    def _failed(self, session: Session, sandbox: Sandbox | None, error: BaseException) -> None:
        keeper = self._keeper
        if not isinstance(error, SessionOver):
            keeper.observer.failed("start", error)
        if session.phase is Phase.STARTING:
            session.change(Transition.START_FAILED, type(error).__name__)
        if sandbox is None:
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
