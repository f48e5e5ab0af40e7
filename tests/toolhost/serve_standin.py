"""`toolhost serve` over the stand-in manager: python -m tests.toolhost.serve_standin [--hang [SECONDS]]."""

from __future__ import annotations

import asyncio
import sys

from tests.toolhost.standin import StandInManager
from toolhost.cli.serve import launch, listening
from toolhost.config import load
from toolhost.services import build


class HangingManager(StandInManager):
    """Its shutdown never ends."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def main() -> None:
    bound_s = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    settings = load(flags={"server": {"listen": "127.0.0.1:0", "shutdown_s": bound_s}})
    manager = HangingManager() if "--hang" in sys.argv else StandInManager()
    with listening(settings) as listener:
        sys.exit(launch(build(settings, manager), listener))


if __name__ == "__main__":
    main()
