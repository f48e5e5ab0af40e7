"""Reading hostile documents in a process of its own, which can be killed and has limits.

Above it: `pdf` and `html_isolated`. The worker scripts are started by path and set their limits themselves.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent


class Worker:
    """One run of a worker script.

    Args:
        script: File name beside this module.
        arguments: Numbers for its command line.
        data: The document, given on standard input.
        seconds: After which it is killed.
    """

    def __init__(self, script: str, arguments: Sequence[int], data: bytes, seconds: float) -> None:
        # -I: nothing of the host's settings, folders or user site reaches the worker.
        self._command = [sys.executable, "-I", str(_FOLDER / script), *map(str, arguments)]
        self._data = data
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = threading.Event()

    def kill(self) -> None:
        """End the process; safe at any time and from any thread."""
        self._killed.set()
        if self._process is not None:
            self._process.kill()

    def output(self) -> bytes:
        """What it wrote until it ended or was killed."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONIOENCODING": "utf-8"},
        )
        with self._process as process:
            if self._killed.is_set():
                process.kill()
            try:
                output, _ = process.communicate(self._data, timeout=self._seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            except BaseException:
                process.kill()
                raise
        return output

    async def output_async(self) -> bytes:
        """`output` without blocking the event loop; cancelling ends the process."""
        try:
            return await asyncio.to_thread(self.output)
        except asyncio.CancelledError:
            self.kill()
            raise
