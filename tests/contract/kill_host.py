"""A host to be killed: sessions that count on and on, each attempt with an id of its own. Prints what was acknowledged.

Arguments: a backend of `hosts`, its directory, how many sessions.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sandboxes.manager import SessionManager
from sandboxes.spec import Execution, PythonCall, Retention
from sandboxes.testing.host import attach
from tests.contract.hosts import HOSTS

COUNT = "n = globals().get('n', 0) + 1\nopen('/mnt/data/ran', 'a').write('{ident}\\n')\nn"


async def count(manager: SessionManager, session: str) -> None:
    at = attach(manager, session, Retention.RETAINED)
    number = 0
    while True:
        ident = f"{session}-{number}"
        outcome = await at.run(Execution(PythonCall(COUNT.format(ident=ident)), attempt_id=ident))
        print(session, number, outcome.value, flush=True)
        number += 1


async def main() -> None:
    manager = HOSTS[sys.argv[1]](Path(sys.argv[2])).make()
    print("opening", flush=True)
    await manager.open()
    print("open", flush=True)
    await asyncio.gather(*(count(manager, f"session-{number}") for number in range(int(sys.argv[3]))))


if __name__ == "__main__":
    asyncio.run(main())
