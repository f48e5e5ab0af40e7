"""The directories that a sandbox has in memory: both full, they leave it able to work.

Above: the docker and bubblewrap backends. Below: `spec`.
"""

from __future__ import annotations

from sandboxes.agent.disk import BYTES_A_NAME
from sandboxes.spec import Limits

# Of the memory limit: for the agent and an interpreter. A full tmpfs without it ends PID 1.
SPARE_BYTES = 64 << 20
# What the directories have together, however small the limit is.
LEAST_BYTES = 16 << 20
FEWEST_NAMES = 256


def tmpfs_sizes(limits: Limits) -> tuple[int, int]:
    """Bytes for /tmp and /dev/shm."""
    room = max(limits.memory_bytes - SPARE_BYTES, LEAST_BYTES)
    wanted = limits.tmp_bytes + limits.shm_bytes
    if wanted <= room:
        return limits.tmp_bytes, limits.shm_bytes
    return limits.tmp_bytes * room // wanted, limits.shm_bytes * room // wanted


def tmpfs_options(size: int) -> str:
    """Empty files fill the memory too, with about 1 KiB each: there may be one for every 16 KiB of the size, as in the
    data directory. (runsc counts none: there its own memory limit comes first.)"""
    return f"size={size},nr_inodes={max(size // BYTES_A_NAME, FEWEST_NAMES)},mode=1777"
