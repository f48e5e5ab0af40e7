"""What keeps a machine of `tests.support.machines` alive, and its first process: standard library, runs by path.

It reaps what is orphaned and ends at the end of its standard input: when the test closes it or dies, however. As the
first process of a pid namespace its end is the end of everything in it. Arguments: directories to remove at its end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the test decides
    signal.signal(signal.SIGCHLD, _reap)
    os.write(1, b"ready\n")
    os.close(1)
    while os.read(0, 1):
        pass
    for directory in sys.argv[1:]:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
