"""`toolhost serve` over the stand-in: python -m tests.toolhost.serve_standin [--hang [SECONDS] | --port N]."""

from __future__ import annotations

import asyncio
import sys

from tests.toolhost.standin import StandInManager
from toolhost import telemetry
from toolhost.cli.serve import launch, listening
from toolhost.config import load
from toolhost.services import build


class HangingManager(StandInManager):
    """Its shutdown never ends."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def main() -> None:
    number = sys.argv[2] if len(sys.argv) > 2 else None
    port, bound_s = (number, 1.0) if "--port" in sys.argv else ("0", float(number or 1.0))
    settings = load(flags={"server": {"listen": f"127.0.0.1:{port}", "shutdown_s": bound_s}})
    telemetry.configure(settings.log)
    manager = HangingManager() if "--hang" in sys.argv else StandInManager()
    with listening(settings) as listener:
        sys.exit(launch(build(settings, manager), listener))


if __name__ == "__main__":
    main()
