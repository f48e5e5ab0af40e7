"""The options of a directory that a sandbox has in memory.

Above: the docker and bubblewrap backends. Below: nothing.
"""

from __future__ import annotations

from sandboxes.agent.disk import BYTES_A_NAME

FEWEST_NAMES = 256


def tmpfs_options(size: int) -> str:
    """Empty files fill the memory too, with about 1 KiB each: there may be one for every 16 KiB of the size, as in the
    data directory. (runsc counts none: there its own memory limit comes first.)"""
    return f"size={size},nr_inodes={max(size // BYTES_A_NAME, FEWEST_NAMES)},mode=1777"
