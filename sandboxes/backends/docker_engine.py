"""A Docker engine's API: blocking calls in bounded threads, each with its own deadline, and its errors as ours.

Above: `docker` and its other helpers. Below: the docker SDK. A call that hangs holds one thread until the deadline of
its own HTTP request has passed; everybody else goes on with the others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import docker
import requests
from docker import errors

from sandboxes.errors import BackendError, EngineUnavailable, EnvironmentMissing, IsolationUnavailable, NoCapacity

OLDEST_API = "1.41"  # engine 20.10
CONNECT_S = 5.0
PATIENCE_S = (10.0, 20.0)  # for the answer to a question, the first time and the second
# What an engine says (in any of its layers) when the machine is at an end, and trying later may work.
EXHAUSTED = ("no space left", "cannot allocate memory", "resource temporarily unavailable", "too many open files")
EXHAUSTED_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})

P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """One engine, by its address (`unix:///var/run/docker.sock`, `tcp://HOST:PORT`)."""

    def __init__(self, url: str, *, threads: int) -> None:
        self.url = url
        self._threads = threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="docker")
        self._clients: dict[float, docker.APIClient] = {}

    @property
    def local(self) -> bool:
        """Whether it sees the file system that this process sees (a unix socket may still be forwarded: `probe`)."""
        return self.url.startswith(("unix://", "http+unix://"))

    def client(self, timeout_s: float) -> Any:
        """The SDK's `APIClient` (its types are incomplete), whose every HTTP request is given up after `timeout_s`.
        Made without asking the engine."""
        if timeout_s not in self._clients:
            self._clients[timeout_s] = docker.APIClient(
                base_url=self.url, version=OLDEST_API, timeout=int(timeout_s), max_pool_size=self._threads
            )
        return self._clients[timeout_s]

    def ask(self, question: Callable[[Any], T]) -> T:
        """What a question gives, which changes nothing in the engine. One whose answer does not come is asked again:
        the engine was slow for a moment, or it was lost on the way. Blocking."""
        *before, last = PATIENCE_S
        for patience_s in before:
            with contextlib.suppress(requests.ReadTimeout):
                return question(self.client(patience_s))
        return question(self.client(last))

    async def call(self, deadline_s: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` in a thread. Raises EngineUnavailable after `deadline_s`, and the engine's errors as ours.

        What was given up goes on in its thread: only work that may be left undone or done goes here.
        """
        running = self.start(work, *args, **kwargs)
        try:
            async with asyncio.timeout(deadline_s):  # `wait_for` can swallow a cancellation before Python 3.12
                return await asyncio.shield(running)
        except TimeoutError:
            running.add_done_callback(_forget)
            raise EngineUnavailable(f"the Docker engine did not answer within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            running.add_done_callback(_forget)
            raise

    def start(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """The same without a deadline, for work that cleans up after itself."""

        def translated() -> T:
            with translating():
                return work(*args, **kwargs)

        return asyncio.get_running_loop().run_in_executor(self._pool, translated)

    def attach(self, container: str, *, output: bool, timeout_s: float) -> socket.socket:
        """A raw stream to PID 1's stdin; with `output`, its stdout and stderr come back in the engine's frames."""
        wanted = {"stdin": 1, "stdout": int(output), "stderr": int(output), "stream": 1, "logs": 0}
        wrapped: Any = self.client(timeout_s).attach_socket(container, params=wanted)
        raw: socket.socket = getattr(wrapped, "_sock", wrapped)
        # Taken from under the SDK, whose connection is of no further use: it would close it, or forget to.
        ours = socket.socket(fileno=raw.detach())
        ours.settimeout(timeout_s)
        return ours

    def reach(self) -> None:
        """Raises EngineUnavailable unless somebody listens at a local address. Cheaper and clearer than the SDK, which
        besides forgets to close a socket that it could not connect."""
        if not self.local:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_S)
            try:
                probe.connect("/" + self.url.partition("://")[2].lstrip("/"))
            except OSError as error:
                raise EngineUnavailable(f"no Docker engine answers at {self.url}: {error.strerror}") from None

    def close(self) -> None:
        """Waits for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()


def _forget(running: asyncio.Future[Any]) -> None:
    if not running.cancelled():
        running.exception()  # else asyncio complains that nobody looked


@contextmanager
def translating() -> Iterator[None]:
    """Turns what the SDK raises into errors of this package."""
    try:
        yield
    except errors.ImageNotFound as error:
        raise EnvironmentMissing(f"{explain(error)}: run: toolhost setup --docker") from error
    except errors.APIError as error:
        raise _refusal(explain(error)) from error
    except (errors.DockerException, requests.RequestException, ConnectionError, TimeoutError) as error:
        raise EngineUnavailable(f"the Docker engine does not answer: {_cause(error)}") from error
    except OSError as error:
        if error.errno in EXHAUSTED_NUMBERS:
            raise NoCapacity(f"this machine has no room for a sandbox: {error.strerror}") from error
        raise BackendError(f"a sandbox's directories cannot be used: {error.strerror or error}") from error


def _refusal(said: str) -> BackendError:
    lower = said.lower()
    if "unknown runtime" in lower or "unknown or invalid runtime" in lower:
        return IsolationUnavailable(f"{said}: register it in the engine's daemon.json, or choose another runtime")
    if "executable file not found" in lower or ("no such file or directory" in lower and "exec" in lower):
        return EnvironmentMissing(f"the image has no python3 on its PATH ({said}): choose an image with Python >= 3.11")
    if any(word in lower for word in EXHAUSTED):
        return NoCapacity(f"the engine has no room: {said}")
    if "network" in lower and "not found" in lower:
        return IsolationUnavailable(f"{said}: create it (docker network create), or use another egress")
    return EngineUnavailable(f"the Docker engine refused: {said}")


def explain(error: errors.APIError) -> str:
    """The engine's own words, without the SDK's around them."""
    return str(error.explanation or error).strip()


def _cause(error: BaseException) -> str:
    """What the innermost error says: the HTTP libraries wrap it, as a cause or among their arguments."""
    while inner := error.__cause__ or next((one for one in error.args if isinstance(one, BaseException)), None):
        error = inner
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or error.__class__.__name__
