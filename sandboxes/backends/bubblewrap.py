"""The embedded default: sandboxes by bubblewrap, without a daemon.

Above: the manager, through the contract in `base`. Below: `bwrap_sandboxes`, whose blocking calls run in this
backend's threads, each with a deadline. What it stops and what it does not is in docs/isolation.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import subprocess
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

import sandboxes.agent
from sandboxes.backends import bwrap_binary, cgroups, seccomp, unix_channel
from sandboxes.backends.agent_copy import make_agent
from sandboxes.backends.base import Backend, Channel, Problem, Status
from sandboxes.backends.bwrap_process import Cancel, Cancelled, Patience
from sandboxes.backends.bwrap_sandboxes import NAME, SOCKET, Rights, Sandboxes, exhaustion
from sandboxes.backends.bwrap_system import make_etc
from sandboxes.backends.bwrap_view import AGENT, Settings, View
from sandboxes.backends.guise import Guise
from sandboxes.backends.owner_files import OwnerFiles
from sandboxes.backends.stage import Stage
from sandboxes.backends.uids import UidRange, Uids
from sandboxes.backends.workspaces import Workspaces
from sandboxes.environment import Environment
from sandboxes.errors import BackendError, EngineUnavailable, IsolationUnavailable
from sandboxes.owner import Owner
from sandboxes.spec import Handle, SandboxSpec, Usage

LAUNCH_S = 20.0
DESTROY_S = 90.0
CALL_S = 10.0
OPEN_S = 120.0
PROBE_S = 20.0
# Launches at once. Each waits for most of its time; more than a few only take turns on the processors.
LAUNCHERS = 8
RUN_DIRECTORY = Path("/run/toolhost")
# Since Linux 5.14 RLIMIT_NPROC counts within a user namespace (clone(2), user_namespaces(7): ucounts), so that every
# sandbox of one ordinary user has its own count.
COUNTED_PER_NAMESPACE = (5, 14)

# For who only looks and removes: what removes a workspace needs the system's programs alone.
NO_ENVIRONMENT = Environment((), (), PurePosixPath("/nonexistent"), platform.python_version(), "")

P = ParamSpec("P")
T = TypeVar("T")


class BubblewrapBackend(Backend):
    """Sandboxes as process trees of this machine.

    As root: a uid of `uids` and a control group for each. As an ordinary user: one uid, resource limits only.
    `state_dir`: where records and workspaces are kept, below `bubblewrap/`; mode 0700. `environment` says, when this is
    opened, what user code runs in. `agent`: the directory with the agent's programs. `timeout_s`, `grace_s`,
    `fence_s`: for the agent's configuration (see `agent.wire`), seconds.
    `run_directory`: where root hosts of this machine claim uids.
    """

    name = NAME

    def __init__(
        self,
        *,
        state_dir: Path,
        owner: Owner,
        environment: Callable[[], Environment],
        agent: Path | None = None,
        uids: UidRange | None = None,
        timeout_s: float = 120.0,
        grace_s: float = 2.0,
        fence_s: float | None = None,
        run_directory: Path = RUN_DIRECTORY,
    ) -> None:
        self._owner = owner
        self._root = state_dir / NAME
        self._environment = environment
        self._agent = agent if agent is not None else Path(sandboxes.agent.__path__[0])
        self._times = (timeout_s, grace_s, fence_s)
        self._uids = uids or UidRange()
        self._run_directory = run_directory
        self._sandboxes: Sandboxes | None = None
        self._launchers = ThreadPoolExecutor(LAUNCHERS, thread_name_prefix="bubblewrap-launch")
        # Apart, so that looking waits neither for many starts nor for the removal of many files.
        self._enders = ThreadPoolExecutor(4, thread_name_prefix="bubblewrap-end")
        self._callers = ThreadPoolExecutor(4, thread_name_prefix="bubblewrap-call")
        self._keys: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._watched: dict[int, subprocess.Popen[bytes]] = {}

    # --- the contract --------------------------------------------------------------------------------------------

    async def open(self, *, launching: bool = True) -> None:
        self._sandboxes = await self._call(self._launchers, OPEN_S, self._opened, launching)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for descriptor in list(self._watched):
            loop.remove_reader(descriptor)
            os.close(descriptor)
        for outer in self._watched.values():
            # It goes on without this object, which would otherwise complain about a child that was not waited for.
            if outer.poll() is None:
                outer.returncode = 0
        self._watched.clear()
        for executor in (self._launchers, self._enders, self._callers):
            executor.shutdown(wait=False, cancel_futures=True)

    async def probe(self) -> Sequence[Problem]:
        try:
            return await self._call(self._launchers, OPEN_S, self._problems)
        except BackendError as error:
            return [Problem(error.message, "try again; see the host's log", fatal=True)]

    @property
    def differences(self) -> frozenset[str]:
        found = {"kernel-shared", "disk-quota-watched"}
        opened = self._opened_sandboxes()
        missing = ["memory", "pids", "cpu"] if opened.rights is None else opened.rights.groups.missing()
        if "memory" in missing:
            found.add("memory-limit-per-process")
        if "cpu" in missing:
            found.add("cpu-limit-none")
        if "pids" in missing and not opened.view.process_limits:
            found.add("process-limit-none")
        if opened.rights is None:
            found.add("uid-shared")
        if opened.settings.seccomp is None:
            found.add("syscall-filter-none")
        return frozenset(found)

    async def launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        if spec.egress != "none":
            raise IsolationUnavailable(f"bubblewrap sandboxes have no network: egress {spec.egress!r} needs docker")
        async with self._keys.setdefault(key, asyncio.Lock()):
            return await self._launch(key, spec, workspace)

    async def lookup(self, key: str) -> Handle | None:
        return await self._call(self._callers, CALL_S, self._opened_sandboxes().lookup, key)

    async def connect(self, handle: Handle) -> Channel:
        record = await self._call(self._callers, CALL_S, self._opened_sandboxes().running, handle)
        directory = self._opened_sandboxes().files.directory(record.handle.key)
        nonce = self._owner.nonce(handle.sandbox_id)
        return await unix_channel.connect(directory, SOCKET, nonce, timeout_s=CALL_S)

    async def poll(self, handle: Handle) -> Status:
        return await self._call(self._callers, CALL_S, self._opened_sandboxes().poll, handle)

    async def usage(self, handle: Handle) -> Usage:
        return await self._call(self._callers, CALL_S, self._opened_sandboxes().usage, handle)

    async def destroy(self, handle: Handle, *, keep_workspace: bool = False) -> None:
        opened = self._opened_sandboxes()
        await self._call(self._enders, DESTROY_S, opened.destroy, handle, keep_workspace=keep_workspace)

    async def remove_workspace(self, workspace: str) -> None:
        await self._call(self._enders, DESTROY_S, self._opened_sandboxes().remove_workspace, workspace)

    async def list_owned(self) -> Sequence[Handle]:
        return await self._call(self._callers, CALL_S, self._opened_sandboxes().list_owned)

    async def list_workspaces(self) -> Sequence[str]:
        return await self._call(self._callers, CALL_S, self._opened_sandboxes().workspaces.names)

    def title(self, handle: Handle) -> str:
        return f"pid {handle.instance.split('-')[1]}" if handle.instance.count("-") == 2 else handle.sandbox_id

    # --- launching -----------------------------------------------------------------------------------------------

    async def _launch(self, key: str, spec: SandboxSpec, workspace: str) -> Handle:
        opened = self._opened_sandboxes()
        loop = asyncio.get_running_loop()
        cancel = Cancel()
        patience = Patience(time.monotonic() + LAUNCH_S, cancel)
        work = loop.run_in_executor(self._launchers, opened.launch, key, spec, workspace, patience)
        try:
            handle, fresh = await asyncio.shield(work)
        except asyncio.CancelledError:
            cancel.set()
            await _finished(self._undone(work))
            raise
        finally:
            cancel.close()
        if fresh:
            self._watch(opened.outers[handle.sandbox_id])
        return handle

    async def _undone(self, work: asyncio.Future[tuple[Handle, bool]]) -> None:
        """Waits for a launch that nobody wants any more, and destroys what it started."""
        with contextlib.suppress(Cancelled, BackendError):
            handle, fresh = await work
            if fresh:
                await self.destroy(handle)

    def _watch(self, outer: subprocess.Popen[bytes]) -> None:
        """Reaps the outer process when it ends."""
        try:
            descriptor = os.pidfd_open(outer.pid)
        except ProcessLookupError:  # a destroy was quicker
            return
        loop = asyncio.get_running_loop()

        def reap() -> None:
            loop.remove_reader(descriptor)
            del self._watched[descriptor]
            os.close(descriptor)
            outer.poll()

        self._watched[descriptor] = outer
        loop.add_reader(descriptor, reap)

    # --- opening -------------------------------------------------------------------------------------------------

    def _opened(self, launching: bool = True) -> Sandboxes:
        timeout_s, grace_s, fence_s = self._times
        environment = self._environment() if launching else NO_ENVIRONMENT
        if platform.system() != "Linux":
            raise IsolationUnavailable("bubblewrap isolates on Linux only: use the docker backend")
        with exhaustion():
            files, workspaces = OwnerFiles(self._root), Workspaces(self._root)
            files.make()
            workspaces.make()
            settings = Settings(
                owner=self._owner,
                root=self._root,
                environment=environment,
                agent=self._made("agent", launching)
                or make_agent(self._root, self._agent, AGENT, environment.python_version),
                seccomp=seccomp.program(),
                etc=self._made("etc", launching) or make_etc(self._root),
                timeout_s=timeout_s,
                grace_s=grace_s,
                fence_s=fence_s,
            )
            opened = self._isolating(settings, files, workspaces)
            opened.sweep()
        return opened

    def _made(self, name: str, launching: bool) -> Path | None:
        """For who only removes, what an earlier start has made will do: the disk may be full."""
        return None if launching else next(self._root.glob(f"{name}-*"), None)

    def _isolating(self, settings: Settings, files: OwnerFiles, workspaces: Workspaces) -> Sandboxes:
        """With the first bubblewrap here that isolates. Raises IsolationUnavailable."""
        refusal = bwrap_binary.INSTALL
        for binary in bwrap_binary.find():
            rights, path = None, binary.path
            if os.geteuid() == 0:
                rights = self._rights(settings, binary)
                if binary.tree is not None:
                    path = rights.stage.path("bubblewrap") / binary.path.relative_to(binary.tree)
            counted = rights is not None or _kernel() >= COUNTED_PER_NAMESPACE
            stage, grouped = (rights.stage, rights.groups.memory is not None) if rights is not None else (None, False)
            view = View(settings, stage, memory_group=grouped, process_limits=counted)
            opened = Sandboxes(settings, view, path, rights, files, workspaces)
            try:
                opened.check_isolation(PROBE_S)
            except EngineUnavailable as error:
                refusal = f"{binary.path} cannot isolate here ({error.message}): {bwrap_binary.advice(error.message)}"
            else:
                return opened
        raise IsolationUnavailable(refusal)

    def _rights(self, settings: Settings, binary: bwrap_binary.Binary) -> Rights:
        fixed = {"etc": settings.etc, "agent": settings.agent}
        fixed |= {name: mount.source for name, mount in settings.mounts().items()}
        if binary.tree is not None:
            fixed["bubblewrap"] = binary.tree
        rights = Rights(
            uids=Uids(self._run_directory / "uids", self._uids),
            uid_range=self._uids,
            groups=cgroups.find(),
            stage=Stage(self._run_directory / "stage", fixed),
            guise=Guise(),
        )
        rights.stage.make()
        rights.uids.make()
        return rights

    def _problems(self) -> list[Problem]:
        try:
            opened = self._sandboxes or self._opened()
        except BackendError as error:
            return [Problem("bubblewrap cannot isolate", error.message, fatal=True)]
        found = []
        if opened.rights is None:
            found.append(
                Problem(
                    "the host is not root: sandboxes share one uid, and memory and cpu are limited per process only",
                    "run the host as root, or use the docker backend, where users do not trust each other",
                )
            )
        elif missing := opened.rights.groups.missing():
            found.append(
                Problem(f"no control group for {', '.join(missing)}", "mount the cgroup file system with write access")
            )
        return found

    # --- threads -------------------------------------------------------------------------------------------------

    def _opened_sandboxes(self) -> Sandboxes:
        if self._sandboxes is None:
            raise RuntimeError("the backend was not opened")
        return self._sandboxes

    async def _call(
        self, executor: ThreadPoolExecutor, timeout_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a blocking call in a thread. It goes on when this is cancelled or its deadline passes.

        Raises EngineUnavailable at the deadline.
        """
        work = asyncio.get_running_loop().run_in_executor(executor, lambda: call(*args, **kwargs))
        work.add_done_callback(_seen)
        try:
            async with asyncio.timeout(timeout_s):  # `wait_for` can swallow a cancellation before Python 3.12
                return await asyncio.shield(work)
        except TimeoutError:
            raise EngineUnavailable(f"this machine did not answer within {timeout_s:.0f} s; try again later") from None


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)


def _seen(work: asyncio.Future[Any]) -> None:
    """Whoever asked may be gone: the error is then nobody's."""
    if not work.cancelled():
        work.exception()


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Runs it to its end, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()
