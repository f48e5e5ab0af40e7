"""One running sandbox and the connection to its agent, which is made again when it breaks.

Above: `session`, `manager`, `pool`, `adoption`. Below: `engine`, `client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from sandboxes.backends.base import Channel, Life, Status
from sandboxes.client import AgentClient, Bound
from sandboxes.engine import Engine
from sandboxes.errors import (
    ChannelLost,
    ChannelStalled,
    EngineUnavailable,
    SandboxError,
    SandboxOutOfMemory,
    StateLost,
    WireError,
)
from sandboxes.events import OnEvent
from sandboxes.spec import Handle, Outcome, PythonCall, ShellCall

_T = TypeVar("_T")

RECONNECTS = 3
BACKOFF_S = 0.05
ENGINE_BACKOFF_S = 1.0  # where the engine is needed to connect again, and does not answer: it may be restarting
REMOTE_RECONNECTS = 40  # where a node's own host may have to come back first: it takes seconds, not milliseconds
REMOTE_BACKOFF_S = 0.25
USAGE_S = 2.0
ACK_DELAY_S = 0.5  # acknowledgements go with the next call, or after so long


class Sandbox:
    """A handle and a client. `on_lost` is called when the connection ended by itself: the sandbox may have died."""

    def __init__(self, engine: Engine, handle: Handle) -> None:
        self.handle = handle
        self.on_lost: Callable[[], None] | None = None
        self._engine = engine
        self._client: AgentClient | None = None
        self._connecting = asyncio.Lock()
        self._acks: list[str] = []
        self._ack_timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._memory_kills = 0

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.alive

    async def client(self) -> AgentClient:
        """The open connection, made where there is none.

        Raises StateLost when the sandbox is gone or another answers, EngineUnavailable, ChannelLost, WireError.
        """
        if self._ended:
            raise StateLost("it was ended", sandbox=self.handle.sandbox_id)
        if self._client is not None and self._client.alive:
            return self._client
        async with self._connecting:
            if self._client is not None:
                if self._client.alive:
                    return self._client
                await self._client.close()
            channel = await self._reached()
            client = await AgentClient.connect(channel, on_lost=self._lost)
            if client.hello.sandbox != self.handle.sandbox_id:
                await client.close()
                raise StateLost("another sandbox answers in this one's place", sandbox=self.handle.sandbox_id)
            self._client = client
            return client

    async def execute(
        self,
        attempt: str,
        digest: str,
        call: PythonCall | ShellCall,
        bound: Bound,
        *,
        cap: int,
        queued_at: float,
        session: str | None = None,
        on_event: OnEvent | None = None,
    ) -> Outcome:
        """Runs a call, through broken connections: the agent's own table makes a repeated `exec` join the first.
        `session`: as for `AgentClient.execute`.

        Raises StateLost with what the engine says of the end, ChannelLost when it runs and cannot be reached, and what
        `AgentClient.execute` raises.
        """

        def ask(client: AgentClient) -> Coroutine[None, None, Outcome]:
            return client.execute(
                attempt,
                digest,
                call,
                bound,
                cap=cap,
                queued_at=queued_at,
                session=session,
                on_event=on_event,
                acked=self._take_acks(),
            )

        return await self._persist(ask)

    async def attach(self, attempt: str, bound: Bound, on_event: OnEvent | None = None) -> Outcome:
        """Joins or collects an attempt. Raises AttemptUnknown, and as `execute` does."""
        return await self._persist(lambda client: client.attach(attempt, bound, on_event))

    async def cancel(self, attempt: str, why: str) -> None:
        client = await self.client()
        await client.cancel(attempt, why)

    async def running(self) -> str | None:
        """The attempt that runs in it, whoever sent it. Raises StateLost, EngineUnavailable, ChannelLost."""
        running = (await self._persist(lambda client: client.status())).get("running")
        return running if isinstance(running, str) else None

    def acknowledge(self, attempt: str) -> None:
        """The ledger has committed this attempt: the agent may forget it. Sent with the next call, or soon."""
        self._acks.append(attempt)
        if self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acks_due)

    async def close(self) -> None:
        """Ends the connection; the sandbox lives on. Never raises."""
        if self._client is not None:
            self._send_acks(self._client)
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def status(self) -> Status:
        """What the engine says. Raises EngineUnavailable."""
        return await self._engine.poll(self.handle)

    async def fate(self) -> None:
        """Raises StateLost when the engine says that the sandbox has ended. Doubt leaves it alive."""
        if self._ended:
            raise StateLost("it was ended", sandbox=self.handle.sandbox_id)
        try:
            status = await self.status()
        except StateLost:
            raise
        except SandboxError:
            return
        if status.life is not Life.RUNNING:
            error = SandboxOutOfMemory if status.out_of_memory else StateLost
            raise error(describe(status), sandbox=self.handle.sandbox_id)

    async def ran_out_of_memory(self) -> bool:
        """Whether the engine has ended processes in it for want of memory since this was last asked. Never raises."""
        try:
            async with asyncio.timeout(USAGE_S):
                kills = (await self._engine.usage(self.handle)).oom_kills or 0
        except (SandboxError, TimeoutError):
            return False
        before, self._memory_kills = self._memory_kills, kills
        return kills > before

    async def destroy(self, *, keep_workspace: bool = False) -> None:
        """Ends it. Idempotent. Raises EngineUnavailable."""
        self._ended = True
        await self.close()
        await self._engine.destroy(self.handle, keep_workspace=keep_workspace)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _persist(self, ask: Callable[[AgentClient], Coroutine[None, None, _T]]) -> _T:
        remote = self._engine.backend.shared
        tries = REMOTE_RECONNECTS if remote else RECONNECTS
        sent = False
        for done in range(tries + 1):
            backoff_s = REMOTE_BACKOFF_S if remote and done >= RECONNECTS else BACKOFF_S
            try:
                client = await self.client()
                sent = True
                return await ask(client)
            except EngineUnavailable as error:
                if not sent:
                    raise
                if done == tries:  # it runs, or it does not: nobody can say
                    raise ChannelLost(f"transport lost, and {error.message}", sandbox=self.handle.sandbox_id) from error
                await asyncio.sleep(backoff_s if remote else ENGINE_BACKOFF_S)
            except ChannelStalled:
                await self.fate()
                raise
            except ChannelLost:
                await self.fate()
                if done == tries:
                    raise
                await asyncio.sleep(backoff_s)
            except WireError as error:
                raise StateLost(f"its agent broke the protocol ({error.message})") from error
        raise AssertionError("unreachable")

    async def _reached(self) -> Channel:
        """A new channel. An engine may notice an end only after the connection has broken and was found alive once
        more: who then cannot be reached is asked again how it ended, which says more than that it has."""
        try:
            return await self._engine.connect(self.handle)
        except StateLost as error:
            if type(error) is StateLost:
                await self.fate()
            raise

    def _acks_due(self) -> None:
        if self._client is not None:
            self._send_acks(self._client)

    def _send_acks(self, client: AgentClient) -> None:
        if acks := self._take_acks():
            client.acknowledge(acks)

    def _take_acks(self) -> list[str]:
        """What is to be acknowledged. One that is lost changes nothing: who connects next finds its result kept, and
        settles it again."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        acks, self._acks = self._acks, []
        return acks

    def _lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()


def describe(status: Status) -> str:
    """Why a sandbox is not there any more, as the end of a sentence about it."""
    if status.out_of_memory:
        return "it ran out of memory" + (f" ({status.detail})" if status.detail else "")
    if status.life is Life.GONE:
        return "it was removed from outside" + (f" ({status.detail})" if status.detail else "")
    return f"it ended ({status.detail})" if status.detail else "it ended"
