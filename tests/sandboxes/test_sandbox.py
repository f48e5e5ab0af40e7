"""What is said of a sandbox that has ended."""

from __future__ import annotations

import pytest

from sandboxes.backends.base import Life, Status
from sandboxes.engine import Engine
from sandboxes.errors import NodeGone, SandboxOutOfMemory, StateLost
from sandboxes.owner import Owner
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Handle, SandboxSpec
from sandboxes.testing.fake_backend import FakeBackend
from sandboxes.testing.host import Recorder

OWNER = Owner("feedfacefeedface", b"k" * 32)


class FullBackend(FakeBackend):
    """Its sandboxes have ended for want of memory, which only `poll` tells."""

    async def poll(self, handle: Handle) -> Status:
        return Status(Life.ENDED, "exit code 137", out_of_memory=True)


async def ended(backend: FakeBackend) -> Sandbox:
    handle = await backend.launch("k", SandboxSpec(), "w")
    backend.engine.sandboxes[handle.sandbox_id].ended = "killed"
    return Sandbox(Engine(backend, Recorder(), launch_s=5, destroy_s=5, engine_s=5), handle)


async def test_who_cannot_be_reached_any_more_is_told_why_it_ended() -> None:
    sandbox = await ended(FullBackend(OWNER))
    with pytest.raises(SandboxOutOfMemory, match="out of memory"):
        await sandbox.client()


async def test_any_other_end_is_told_as_the_engine_says_it() -> None:
    sandbox = await ended(FakeBackend(OWNER))
    with pytest.raises(StateLost, match="it ended \\(killed\\)"):
        await sandbox.client()


async def test_a_node_that_is_gone_is_told_as_such() -> None:
    backend = FakeBackend(OWNER)
    sandbox = await ended(backend)
    backend.engine.lost_nodes.add(sandbox.handle.node)
    with pytest.raises(NodeGone):
        await sandbox.client()
