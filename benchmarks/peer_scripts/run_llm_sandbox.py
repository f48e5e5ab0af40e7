"""llm-sandbox with its Docker backend, one session kept open. Lines in: start, run. A JSON line out for each."""

import json
import logging
import sys
import time

from llm_sandbox import SandboxSession

logging.disable(logging.CRITICAL)
IMAGE = "toolhost-python"


def main() -> None:
    session = None
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            if line.strip() == "start":
                session = SandboxSession(
                    lang="python",
                    image=IMAGE,
                    keep_template=True,
                    skip_environment_setup=True,
                    runtime_configs={"network_mode": "none", "entrypoint": []},
                )
                session.open()
            assert session is not None
            result = session.run("print(1+1)")
            if result.stdout.strip() != "2":
                raise RuntimeError(f"it printed {result.stdout[:100]!r} {result.stderr[:200]!r}")
            answer: dict[str, object] = {"seconds": time.perf_counter() - began}
        except Exception as error:  # noqa: BLE001 - whatever it is goes to who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if session is not None:
        session.close()


main()
