"""The Ray actor of a node. It runs in a process of Ray, on its node, and comes back there when it dies.

Above: `ray_bridge`, which makes one on every node that takes sessions. Below: `ray_node`, in an event loop of its own
thread; a second thread asks the head for the leases at this node, again and again. That asking may block for as long as
the head is away, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from sandboxes.backends.ray_names import NodeSettings, digest, read_owner, workspace_of
from sandboxes.backends.ray_node import Node

log = logging.getLogger(__name__)

OPEN_S = 150.0
ROUND_S = 60.0
SLOWEST_SHARE = 20  # asking takes at most so small a part of the time: 1/20


class NodeHost:
    """`owner_id`: whose node this is; the owner file must say the same. Never raises when it is made: an actor that
    does is gone for good. `describe` says what is wrong."""

    def __init__(self, settings: NodeSettings, owner_id: str, capacity: int) -> None:
        import ray
        from ray.util import get_node_ip_address

        # Ray's own lines go to its files; so do these.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._settings = settings
        self._owner_id = owner_id
        self._capacity = capacity
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._problem = ""
        self._node: Node | None = None
        _be_as_a_host()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="toolhost-node", daemon=True).start()
        self._start()

    def describe(self) -> dict[str, Any]:
        """Where the node is, and whether it takes sessions."""
        if self._node is None:
            self._start()
        node = self._node
        place = None if node is None or node.place is None else str(node.place)
        problem = self._problem if node is None else node.problem
        return {"place": place, "problem": problem, "settings": digest(self._settings)}

    def _start(self) -> None:
        try:
            owner = read_owner(Path(self._settings.owner_file))
        except (OSError, ValueError) as error:
            self._problem = f"the owner file {self._settings.owner_file} cannot be read on {self._host}: {error}"
            return
        if owner.id != self._owner_id:
            self._problem = f"the owner file {self._settings.owner_file} on {self._host} is another tool host's"
            return
        node = Node(
            self._settings,
            owner,
            node=self._node_id[:12],
            host=self._host,
            capacity=self._capacity,
            release=self._release,
        )
        try:
            asyncio.run_coroutine_threadsafe(node.open(), self._loop).result(OPEN_S)
        except Exception as error:  # it is told, and tried again
            self._problem = f"the node {self._host} cannot start: {type(error).__name__}: {error}"
            log.exception("node")
            return
        self._node, self._problem = node, ""
        for target in (self._ask_for_leases, self._watch_head):
            threading.Thread(target=target, args=(node,), name=target.__name__, daemon=True).start()

    def _release(self, lease: str) -> None:
        """The head may have been away, or have given this node up, while this waited: what is at another node now is a
        session of that one."""
        from ray.util.placement_group import placement_group_table

        if placed_at(placement_group_table(_group(lease))) == self._node_id:
            release(lease)

    def _ask_for_leases(self, node: Node) -> None:
        while True:
            began = time.monotonic()
            try:
                held = leases_at(self._node_id, self._owner_id)
                asked_s = time.monotonic() - began
                asyncio.run_coroutine_threadsafe(node.leases(held, began), self._loop).result(ROUND_S)
            except Exception:  # the next round
                log.exception("leases")
                asked_s = 0.0
            time.sleep(max(self._settings.sweep_s, asked_s * SLOWEST_SHARE))

    def _watch_head(self, node: Node) -> None:
        while True:
            time.sleep(self._settings.sweep_s)
            try:
                asyncio.run_coroutine_threadsafe(node.without_head(), self._loop).result(ROUND_S)
            except Exception:  # the next round
                log.exception("watch")


def leases_at(node_id: str, owner_id: str) -> dict[str, str]:
    """The ids of an owner's leases that are placed at a node, by workspace. Blocks while the head is away."""
    from ray.util.placement_group import placement_group_table

    found = {}
    for ident, group in placement_group_table().items():
        workspace = workspace_of(owner_id, group.get("name") or "")
        if workspace is not None and placed_at(group) == node_id:
            found[workspace] = str(ident)
    return found


def placed_at(group: dict[str, Any]) -> str:
    """The node of a lease as Ray's table has it; "" for one that has none now."""
    return str(group.get("bundles_to_node_id", {}).get(0, "")) if group.get("state") == "CREATED" else ""


def release(lease: str) -> None:
    """Gives a lease back. Blocks while the head is away."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(_group(lease))


def _group(lease: str) -> Any:
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(lease)))


def _be_as_a_host() -> None:
    """Ray starts its workers as what may wait and may be killed first (nice 15, out-of-memory score 1000), and
    sandboxes inherit that. Every sandbox takes a few descriptors. Threads that start later have what the first has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        Path("/proc/self/oom_score_adj").write_text("0")
    except OSError as error:
        log.warning("sandboxes run with Ray's low priority (%s): start Ray with RAY_worker_niceness=0", error)
