"""Runs on a machine of the cluster: keeps the handles of all sandboxes, and tries to connect to them when told to.

Commands are lines of standard input, answers lines of JSON: `keep` (the address of each one's node), `connect` (for
each kept one "connected", or the name of the error).
"""

from __future__ import annotations

import asyncio
import json
import sys

from sandboxes.backends.base import Backend
from sandboxes.errors import SandboxError
from sandboxes.spec import Handle
from toolhost.backends import create_backend, owner_of
from toolhost.config import load


async def tried(backend: Backend, handle: Handle) -> str:
    try:
        channel = await backend.connect(handle)
    except SandboxError as error:
        return type(error).__name__
    await channel.close()
    return "connected"


async def main() -> None:
    settings = load(None, {"sandbox": {"backend": "ray"}})
    backend = create_backend(settings, owner_of(settings))
    await backend.open(launching=False)
    kept: list[Handle] = []
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "keep":
            kept = list(await backend.list_owned())
            print(json.dumps([handle.node.partition(":")[0] for handle in kept]), flush=True)
        else:
            print(json.dumps(await asyncio.gather(*(tried(backend, handle) for handle in kept))), flush=True)
    await backend.close()


asyncio.run(main())
