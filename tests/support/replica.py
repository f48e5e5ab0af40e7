"""A tool host of a cluster: `toolhost serve` on a machine of `tests.support.cluster`, reached from the test.

`RunningHost` with another place: its port is one of the test's loopback that leads to the machine's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandboxes.owner import Owner
from tests.support.cluster import Cluster
from tests.support.host import RunningHost
from tests.support.machines import Machine, Running

MEMORY_BYTES = 256 << 20


class Replica(RunningHost):
    """`number`: of its port and state directory on the machine; the edge if none is given."""

    def __init__(
        self,
        cluster: Cluster,
        number: int,
        *,
        machine: Machine | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.machine = machine or cluster.edge
        self.inner = f"127.0.0.1:{8000 + number}"
        variables = {
            "TOOLHOST_SANDBOX__MEMORY_BYTES": str(MEMORY_BYTES),
            "TOOLHOST_RAY__ADDRESS": cluster.address,
            "TOOLHOST_RAY__TOKEN_FILE": str(cluster.token_file),
            "TOOLHOST_RAY__OWNER_FILE": str(owner_file(cluster)),
            "TOOLHOST_RAY__NODE_STATE_DIR": "/run/toolhost-nodes",
            "TOOLHOST_STORE__KIND": "redis",
            "TOOLHOST_STORE__URL": cluster.redis_url.removesuffix("/0") + "/1",  # the head's tables are in the first
            "TOOLHOST_LIFECYCLE__QUEUE_S": "3",
            "TOOLHOST_RAY__UNUSED_S": "5",
            **(environment or {}),
        }
        super().__init__(
            cluster.directory / f"replica{number}",
            backend="ray",
            arguments=arguments,
            environment=variables,
            port=self.machine.forward(8000 + number),
        )
        self.inside: Running | None = None

    def spawn(self) -> None:
        command = [
            *(sys.executable, "-m", "toolhost", "serve"),
            *("--listen", self.inner, "--state-dir", str(self.state_dir), "--backend", self.backend),
            *self.arguments,
        ]
        with self.log.open("ab") as log:
            self.inside = self.cluster.popen(
                self.machine, command, stdout=log, stderr=log, environment=self.environment
            )
        self.process = self.inside.entered

    @property
    def inside_pid(self) -> int:
        """The tool host's pid on this machine."""
        assert self.inside is not None
        return self.inside.pid

    def kill(self) -> None:
        assert self.inside is not None
        self.inside.kill()
        self.inside.wait(30)

    def terminate(self, timeout_s: float = 60.0) -> int:
        assert self.inside is not None
        self.inside.terminate()
        return self.inside.wait(timeout_s)


def owner_file(cluster: Cluster) -> Path:
    """The cluster's owner: made once, and seen by all its machines."""
    Owner.load(cluster.directory)
    return cluster.directory / "owner"
