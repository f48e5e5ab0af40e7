"""What a sandbox sees, and what its agent is told: bubblewrap's arguments and the agent's configuration.

Above: `bwrap_sandboxes`. Below: the environment that user code runs in. Nothing here starts or changes anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sandboxes.backends.bwrap_process import NAMESPACES
from sandboxes.backends.bwrap_system import etc_arguments, system_arguments
from sandboxes.backends.stage import Stage
from sandboxes.backends.tmpfs import tmpfs_sizes
from sandboxes.environment import Environment, Mount
from sandboxes.owner import Owner
from sandboxes.spec import Limits, SandboxSpec

DATA = "/mnt/data"
AGENT = "/opt/toolhost/agent"
AGENT_MAIN = "toolhost_agent.py"
# User code's environment, beside PATH, where the spec does not say otherwise.
VARIABLES = {
    "HOME": DATA,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "user",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the backend was made with. Times are seconds."""

    owner: Owner
    root: Path
    environment: Environment
    agent: Path
    etc: Path
    seccomp: bytes | None
    timeout_s: float
    grace_s: float
    fence_s: float | None

    def mounts(self) -> dict[str, Mount]:
        """The environment's, by names that are also those on the stage."""
        return {f"environment-{number}": mount for number, mount in enumerate(self.environment.mounts)}


@dataclass(frozen=True, slots=True)
class View:
    """`stage`: where a root host shows things. `memory_group`: a control group holds the memory. `process_limits`:
    processes are counted for each sandbox."""

    settings: Settings
    stage: Stage | None
    memory_group: bool
    process_limits: bool

    def arguments(self, limits: Limits) -> list[str]:
        """Everything a sandbox sees, but its workspace."""
        settings, reach = self.settings, self._reach
        arguments = [
            *NAMESPACES,
            *("--setenv", "LANG", VARIABLES["LANG"]),
            *("--setenv", "HOME", DATA),  # else Python asks for it, of files that it would not open otherwise
            *system_arguments(),
            *etc_arguments(reach("etc", settings.etc)),
        ]
        arguments += ["--proc", "/proc", "--dev", "/dev"]
        tmp_bytes, shm_bytes = tmpfs_sizes(limits)
        arguments += [*self._in_memory("shm", shm_bytes), "/dev/shm", "--remount-ro", "/dev"]
        arguments += [*self._in_memory("tmp", tmp_bytes), "/tmp"]
        for directory in settings.environment.directories:
            arguments += ["--perms", "0755", "--dir", str(directory)]
        for name, mount in settings.mounts().items():
            arguments += ["--ro-bind", str(reach(name, mount.source)), str(mount.target)]
        return [*arguments, "--ro-bind", str(reach("agent", settings.agent)), AGENT]

    def _in_memory(self, name: str, size: int) -> list[str]:
        if self.stage is not None:
            return ["--bind", str(self.stage.path(name))]
        return ["--perms", "1777", "--size", str(size), "--tmpfs"]

    def _reach(self, name: str, source: Path) -> Path:
        return source if self.stage is None else self.stage.path(name)

    def command(self, configuration: int) -> list[str]:
        """The agent and its first interpreter. `configuration`: the descriptor from which the agent reads it."""
        python = str(self.settings.environment.python)
        # With `site`, which the interpreter needs that is forked from it.
        return [python, "-I", "-B", f"{AGENT}/{AGENT_MAIN}", f"fd:{configuration}", "fork"]

    def configuration(self, sandbox_id: str, spec: SandboxSpec, listener: int) -> bytes:
        """The agent's configuration (see the end of `agent.wire`)."""
        settings, limits = self.settings, spec.limits
        return json.dumps(
            {
                "sandbox": sandbox_id,
                "owner": settings.owner.id,
                "nonce": settings.owner.nonce(sandbox_id),
                "channel": {"kind": "listen_fd", "fd": listener},
                "peer_check": True,
                "data": DATA,
                "python": [str(settings.environment.python)],
                "site": [],
                "uid": None,
                "gid": None,
                "environment": {**VARIABLES, "PATH": settings.environment.search_path, **spec.environment},
                "preimports": list(spec.preimports),
                "limits": {
                    "memory_bytes": limits.memory_bytes,
                    "memory_rlimit": not self.memory_group,
                    "disk_bytes": limits.disk_bytes,
                    "processes": limits.processes if self.process_limits else None,
                    "open_files": limits.open_files,
                },
                "timeout_s": settings.timeout_s,
                "grace_s": settings.grace_s,
                "fence_s": settings.fence_s,
            }
        ).encode()
