"""The one process of a tool host that speaks with Ray. `python -m sandboxes.backends.ray_bridge FD`.

Above: `ray_leases`, which starts it and starts it again. Below: Ray, `ray_host`.

Ray ends the process of a driver when the head is away for long, and a call may block for as long as it is away: so
Ray is here, and the tool host goes on without it. Requests and answers are lines of JSON on the socket FD; each request
has a thread. The first request is `start`. When the socket ends, so does this.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sandboxes.backends import ray_wire
from sandboxes.backends.ray_names import NODE_LABEL, RESOURCE, STARTING, LocalSettings, NodeSettings, actor_name, digest
from sandboxes.environment import Environment, Mount
from sandboxes.errors import EngineUnavailable, IsolationUnavailable, NoCapacity, SandboxError

THREADS = 48
CONNECTS = 2
# Without room for so long, there is none: what has just become free is told to the head a moment later.
NO_ROOM_S = 1.5
PLACE_S = 20.0
DESCRIBE_S = 3.0
PAUSES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
FULL = frozenset({"NO_RESOURCES", "INFEASIBLE"})


class Bridge:
    """`ray` is imported by `start`, so that its absence can be told."""

    def __init__(self) -> None:
        self._settings: NodeSettings
        self._owner_id = ""
        self._hosts: dict[str, Any] = {}  # actor handles by node id
        self._known: dict[str, dict[str, Any]] = {}  # what NodeHosts said that have started
        self._lock = threading.Lock()
        self._describing = ThreadPoolExecutor(THREADS)

    def start(self, address: str, namespace: str, owner_id: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Connects. Raises IsolationUnavailable, NotAdmitted, EngineUnavailable."""
        # Ray tries 20 times, a second apart, whatever the head says. Who started this tries again where that helps.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", str(CONNECTS))
        try:
            import ray
        except ImportError:
            raise IsolationUnavailable("backend ray needs Ray: pip install 'toolhost[ray]'") from None
        self._settings, self._owner_id = read_settings(settings), owner_id
        try:
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except Exception as error:
            said = everything(error)
            if refusal := refused(said):
                raise ray_wire.NotAdmitted(f"no connection to the Ray cluster {address}: {refusal}") from error
            raise EngineUnavailable(f"no connection to the Ray cluster {address}: {short(error)}") from error
        return {"version": ray.__version__}

    def nodes(self, again: list[str], renew: bool) -> list[dict[str, Any]]:
        """Every node that takes sessions and the head knows; a NodeHost is made where there is none. What is known of a
        node is not asked again, except for those in `again`. `renew`: one with other settings is replaced."""
        import ray

        for ident in again:
            self._known.pop(ident, None)

        def entry(node: dict[str, Any]) -> dict[str, Any]:
            ident, capacity = str(node["NodeID"]), int(node["Resources"][RESOURCE])
            return {
                "node": ident,
                "host": str(node["NodeManagerAddress"]),
                "raylet": int(node["NodeManagerPort"]),
                "capacity": capacity,
                **self._describe(ident, capacity, renew),
            }

        known = ray.nodes()  # type: ignore[no-untyped-call]
        return list(
            self._describing.map(
                entry, [n for n in known if n["Alive"] and n.get("Resources", {}).get(RESOURCE, 0) >= 1]
            )
        )

    def dead(self, nodes: list[str]) -> list[str]:
        """Those of the nodes that the head has declared dead. What it does not know at all is not among them."""
        import ray

        asked = set(nodes)
        known = ray.nodes()  # type: ignore[no-untyped-call]
        return [str(node["NodeID"]) for node in known if node["NodeID"] in asked and not node["Alive"]]

    def lease(self, name: str, avoid: list[str]) -> dict[str, Any]:
        """The lease of that name, made where there is none: its id, its node, and whether this call made it.

        Raises NoCapacity when no node has room, EngineUnavailable.
        """
        from ray.exceptions import RayError
        from ray.util.placement_group import get_placement_group, placement_group, placement_group_table

        fresh = True
        selector = [{NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] if avoid else None
        while True:
            try:
                group = placement_group(
                    [{RESOURCE: 1}],
                    strategy="SPREAD",
                    name=name,
                    lifetime="detached",
                    bundle_label_selector=selector,
                )
                break
            except RayError as error:
                if "already exists" not in str(error):
                    raise EngineUnavailable(f"Ray gives no lease: {short(error)}") from error
            try:
                group, fresh = get_placement_group(name), False
                break
            except ValueError:  # it was removed meanwhile
                time.sleep(PAUSES_S[-1])
        began = time.monotonic()
        full_since: float | None = None
        for turn in range(100_000):
            table = placement_group_table(group)
            state, now = table.get("state"), time.monotonic()
            if state == "CREATED":
                return {"lease": group.id.hex(), "node": table["bundles_to_node_id"][0], "fresh": fresh}
            if state == "REMOVED" or state is None:
                raise ray_wire.LeaseGone("the lease was given back")
            full = table.get("stats", {}).get("scheduling_state") in FULL
            full_since = (full_since or now) if full else None
            if full_since is not None and now - full_since >= NO_ROOM_S:
                self.remove(group.id.hex())
                raise NoCapacity("at capacity: no node of the cluster has room; try again later")
            if now - began >= PLACE_S:
                break
            time.sleep(PAUSES_S[min(turn, len(PAUSES_S) - 1)])
        raise EngineUnavailable("Ray does not place the session; try again later")

    def find(self, name: str) -> dict[str, Any] | None:
        """The lease of that name: its id, its state, and its node ("" while it is on its way to another)."""
        from ray.util.placement_group import get_placement_group, placement_group_table

        from sandboxes.backends.ray_host import placed_at

        try:
            group = get_placement_group(name)
        except ValueError:
            return None
        table = placement_group_table(group)
        state = str(table.get("state"))
        if state == "REMOVED":
            return None
        return {"lease": group.id.hex(), "state": state, "node": placed_at(table)}

    def remove(self, lease: str) -> None:
        """Gives a lease back whose node is gone, or that never had one. Others are their node's to release."""
        from sandboxes.backends.ray_host import release

        release(lease)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _describe(self, node_id: str, capacity: int, renew: bool) -> dict[str, Any]:
        import ray

        if node_id in self._known:
            return self._known[node_id]
        try:
            with self._lock:
                host = self._hosts.get(node_id)
                if host is None:
                    host = self._hosts[node_id] = self._host(node_id, capacity)
            said: dict[str, Any] = ray.get(host.describe.remote(), timeout=DESCRIBE_S)
            if renew and said.get("settings") != digest(self._settings):
                ray.kill(host)
                with self._lock:
                    self._hosts.pop(node_id, None)
                return {"place": None, "problem": STARTING}
        except Exception as error:  # noqa: BLE001  # one node that cannot does not keep the others from it
            with self._lock:
                self._hosts.pop(node_id, None)
            return {"place": None, "problem": f"its NodeHost does not answer: {short(error)}"}
        if said["place"] is not None:
            self._known[node_id] = said
        return said

    def _host(self, node_id: str, capacity: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from sandboxes.backends.ray_host import NodeHost

        return (
            ray.remote(NodeHost)
            .options(
                name=actor_name(node_id),
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
                max_concurrency=8,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._settings, self._owner_id, capacity)
        )


def read_settings(fields: dict[str, Any]) -> NodeSettings:
    """The inverse of `dataclasses.asdict`, with paths and sets as JSON has them."""
    local = dict(fields.pop("local"))
    local["networks"] = frozenset(local["networks"])
    if (given := local["environment"]) is not None:
        local["environment"] = environment_from(given)
    return NodeSettings(local=LocalSettings(**local), **fields)


def environment_from(fields: dict[str, Any]) -> Environment:
    from pathlib import Path, PurePosixPath

    return Environment(
        tuple(PurePosixPath(path) for path in fields["directories"]),
        tuple(Mount(Path(mount["source"]), PurePosixPath(mount["target"])) for mount in fields["mounts"]),
        PurePosixPath(fields["python"]),
        fields["python_version"],
        fields["search_path"],
        tuple(Path(path) for path in fields["needs"]),
    )


def everything(error: BaseException) -> str:
    """What an error of Ray's and its causes say: its own first line names no cause."""
    causes: list[BaseException] = [error]
    while (before := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(before)
    return "\n".join(str(cause) for cause in causes)


def refused(said: str) -> str:
    """Why the head does not admit this machine, and what to do; "" where that is not what Ray says."""
    file = os.environ.get("RAY_AUTH_TOKEN_PATH", "") if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    copied = "copy the head's token file here (`toolhost cluster status` on the head names it)"
    if "RAY_AUTH_TOKEN_PATH is set but" in said:
        return f"the token file {file} is empty or cannot be read: {copied}"
    if "InvalidAuthToken" in said or "AuthenticationError" in said:
        if not file:
            return f"the head wants a token, and this machine has none: {copied}, and name it in ray.token_file"
        return f"the head refused the token in {file}: {copied}"
    if "Version mismatch" in said:
        return f"versions differ: {' '.join(said[said.index('The cluster was started') :].split())[:250]}"
    return ""


def short(error: BaseException) -> str:
    """One line of an error of Ray's, whose own are pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def serve(connection: socket.socket) -> None:
    """Until the other end closes."""
    bridge = Bridge()
    calls: dict[str, Callable[..., Any]] = {
        name: getattr(bridge, name) for name in ("start", "nodes", "dead", "lease", "find", "remove")
    }
    sending = threading.Lock()

    def perform(request: dict[str, Any]) -> None:
        answer: dict[str, Any]
        try:
            answer = {"ok": calls[request["op"]](**request["args"])}
        except SandboxError as error:
            answer = ray_wire.error_fields(error)
        except Exception as error:  # noqa: BLE001  # every request is answered
            answer = ray_wire.error_fields(EngineUnavailable(f"Ray: {type(error).__name__}: {short(error)}"))
        with sending:
            connection.sendall(ray_wire.frame({"id": request["id"], **answer}))

    threads = ThreadPoolExecutor(THREADS)
    with connection.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if request["op"] == "start":  # Ray wants the main thread
                perform(request)
            else:
                threads.submit(perform, request)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(connection)
    finally:
        os._exit(0)  # threads may hang in a call for a head that is away


if __name__ == "__main__":
    main()
