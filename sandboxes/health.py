"""Whether the host can do its work: code runs in a sandbox of its own, and the ledger can be written.

Above: `manager`. Below: `keeper`, `sandbox`.
"""

from __future__ import annotations

import asyncio
import secrets

from sandboxes.client import Bound
from sandboxes.errors import EngineUnavailable, SandboxError
from sandboxes.keeper import Keeper
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Execution, KeyKind, PythonCall, SessionKey

KEY = SessionKey("toolhost", KeyKind.CONNECTION, "health")
CALL = PythonCall("6 * 7")
TIMEOUT_S = 10.0


class Health:
    """Checks are single-flight, and their result is kept for a while: `health_kept_s`, a failure for
    `health_failed_kept_s`. Its sandbox is beyond the caps."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._checking: asyncio.Task[object] | None = None
        self._until = 0.0
        self._result: SandboxError | None = None

    async def check(self) -> None:
        """Raises the SandboxError that stands in the way."""
        if self._checking is None and self._keeper.clock.now() >= self._until:
            self._checking = asyncio.create_task(self._check(), name="health")
        if self._checking is not None:
            await asyncio.shield(self._checking)
        if self._result is not None:
            raise self._result

    async def _check(self) -> None:
        result: SandboxError | None = None
        settings = self._keeper.settings
        try:
            async with asyncio.timeout(settings.health_s):
                await self._keeper.store.put_parts(KEY, "health", {"": b""})
                await self._run_code()
        except TimeoutError:
            result = EngineUnavailable(f"a check that runs code did not end in {settings.health_s:g} s")
        except SandboxError as error:
            result = error
        finally:
            if result is not None:
                self._keeper.observer.failed("health", result)
            self._result = result
            kept_s = settings.health_kept_s if result is None else settings.health_failed_kept_s
            self._until = self._keeper.clock.now() + min(kept_s, settings.health_kept_s)
            self._checking = None

    async def _run_code(self) -> None:
        keeper = self._keeper
        name = f"h-{secrets.token_hex(12)}"
        keeper.busy_ids.add(name)
        try:
            handle = await keeper.engine.launch(name, keeper.settings.spec, name)
            keeper.busy_ids.add(handle.sandbox_id)
        finally:
            keeper.busy_ids.discard(name)
        sandbox = Sandbox(keeper.engine, handle)
        try:
            client = await sandbox.client()
            await client.claim(keeper.owner.ticket(handle.sandbox_id, str(KEY)), str(KEY), 1, 0)
            outcome = await client.execute(
                name,
                Execution(CALL).digest(),
                CALL,
                Bound(TIMEOUT_S, keeper.settings.grace_step_s),
                cap=1000,
                queued_at=keeper.clock.now(),
            )
            if outcome.value != "42":
                raise SandboxError(f"code in a sandbox gave a wrong answer ({outcome.receipt.ending})")
        finally:
            keeper.busy_ids.discard(handle.sandbox_id)
            keeper.spawn(keeper.destroy(sandbox), "health-destroy")
