"""A kernel through jupyter_client's blocking client. Lines in: start, run, restart. A JSON line out for each."""

import json
import sys
import time

from jupyter_client.manager import start_new_kernel


def run(client: object) -> float:
    began = time.perf_counter()
    message = client.execute("1+1")  # type: ignore[attr-defined]
    while True:
        reply = client.get_shell_msg(timeout=30)  # type: ignore[attr-defined]
        if reply["parent_header"].get("msg_id") == message:
            break
    while True:  # the value comes on another channel, and is what one waits for
        said = client.get_iopub_msg(timeout=30)  # type: ignore[attr-defined]
        if said["parent_header"].get("msg_id") == message and said["msg_type"] == "execute_result":
            break
    return time.perf_counter() - began


def main() -> None:
    manager = client = None
    for line in sys.stdin:
        began = time.perf_counter()
        try:
            if line.strip() == "start":
                if manager is not None:
                    client.stop_channels()  # type: ignore[union-attr]
                    manager.shutdown_kernel(now=True)
                    began = time.perf_counter()
                manager, client = start_new_kernel()
                run(client)
                answer = {"seconds": time.perf_counter() - began, "pid": manager.provisioner.pid}
            else:
                answer = {"seconds": run(client)}
        except Exception as error:  # noqa: BLE001 - whatever it is goes to who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    if manager is not None:
        manager.shutdown_kernel(now=True)


main()
