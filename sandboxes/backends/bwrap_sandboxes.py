"""What the bubblewrap backend does, one blocking call each: launch, destroy, look, sweep.

Above: `bubblewrap`, which runs these in threads with deadlines. Below: owner files, workspaces, control groups, uids,
and the process that bubblewrap is.

A launch goes on record first, then makes things; a removal unmakes things, then goes off record. So whatever is
interrupted, by an error or by the host's death, is found and removed by the record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sandboxes.backends import bwrap_process, cgroups, proc_tree, unix_channel
from sandboxes.backends.base import Life, Status
from sandboxes.backends.bwrap_process import REMOVER, Patience
from sandboxes.backends.bwrap_system import system_arguments
from sandboxes.backends.bwrap_view import DATA, Settings, View
from sandboxes.backends.guise import Guise
from sandboxes.backends.owner_files import OwnerFiles, Record
from sandboxes.backends.pidfd import Process
from sandboxes.backends.stage import IN_MEMORY, Stage
from sandboxes.backends.tmpfs import tmpfs_options, tmpfs_sizes
from sandboxes.backends.uids import UidRange, Uids
from sandboxes.backends.workspaces import Workspaces
from sandboxes.errors import BackendError, EngineUnavailable, EnvironmentMissing, NoCapacity, StateLost
from sandboxes.spec import Handle, Limits, SandboxSpec, Usage

NAME = "bubblewrap"
SOCKET = "channel"
LOG = "agent.log"
# Says whether it is PID 1 of a namespace of its own, and which network interfaces there are.
PROBE = ("/bin/sh", "-c", "echo $$; cat /proc/net/dev")
LOCK_S = 30.0
REMOVE_S = 60.0
EXHAUSTED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Rights:
    """What only a root host has: a uid and a control group for every sandbox, and a stage to show them directories."""

    uids: Uids
    uid_range: UidRange
    groups: cgroups.Hierarchies
    stage: Stage
    guise: Guise


@dataclass(slots=True)
class Sandboxes:
    """The sandboxes below one state directory. `rights` is None for an ordinary user."""

    settings: Settings
    view: View
    binary: Path
    rights: Rights | None
    files: OwnerFiles
    workspaces: Workspaces
    outers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_isolation(self, timeout_s: float) -> None:
        """Runs a command that sees what every sandbox sees. Raises EngineUnavailable unless it is isolated; OSError
        where the machine is at an end."""
        uid = self.rights.uid_range.first if self.rights is not None else os.geteuid()
        arguments = [*self.view.arguments(Limits()), "--remount-ro", "/", "--", *PROBE]
        try:
            if self.rights is not None:
                self.rights.stage.enter()
            said = bwrap_process.run([str(self.binary), *arguments], self._identity(uid), timeout_s)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            raise EngineUnavailable(f"{error.filename}: {error.strerror}") from None
        pid, *lines = said.splitlines() or [""]
        interfaces = {line.partition(":")[0].strip() for line in lines if ":" in line}
        if pid != "1" or interfaces != {"lo"}:
            raise EngineUnavailable(f"a probe was not isolated: it said {said[:200]!r}")

    # --- launching -----------------------------------------------------------------------------------------------

    def launch(self, key: str, spec: SandboxSpec, workspace: str, patience: Patience) -> tuple[Handle, bool]:
        """The handle, and whether this call started it. Raises SandboxError, Cancelled; nothing is then left."""
        with exhaustion(), self.files.locked(key, LOCK_S):
            known = self.files.read(key)
            if known is not None:
                self._check_owner(known)
                if known.running():
                    return known.handle, False
                self._remove(known, keep_workspace=True)
            return self._launch_new(key, spec, workspace, patience).handle, True

    def _launch_new(self, key: str, spec: SandboxSpec, workspace: str, patience: Patience) -> Record:
        patience.cancel.check()
        sandbox_id = secrets.token_hex(16)
        handle = Handle(NAME, key, sandbox_id, "", workspace, created_at=time.time())
        environment = self.settings.environment
        for path in (*(mount.source for mount in environment.mounts), *environment.needs):
            if not path.exists():
                raise EnvironmentMissing(f"{path} is gone: run `toolhost setup`, then start the host again")
        launcher = Process.of(os.getpid())
        existing = self.workspaces.uid(workspace)
        record = Record(
            handle=handle,
            owner=self.settings.owner.id,
            uid=self._claim(sandbox_id, launcher, existing),
            group=sandbox_id if self.rights is not None else "",
            launcher=launcher,
        )
        try:
            self.files.write(record)
            if existing is None:
                self.workspaces.create(workspace, record.uid)
            elif existing != record.uid:
                self.workspaces.give(workspace, record.uid)
            if (group := self._group(record)) is not None:
                group.make(spec.limits)
            return self._start(record, spec, patience)
        except BaseException:
            self._remove(self.files.read(key) or record, keep_workspace=existing is not None)
            raise

    def _claim(self, sandbox_id: str, launcher: Process, existing: int | None) -> int:
        if self.rights is None:
            return os.geteuid()
        preferred = existing if existing is not None and existing in self.rights.uid_range else None
        return self.rights.uids.claim(sandbox_id, launcher, preferred)

    def _group(self, record: Record) -> cgroups.Group | None:
        if self.rights is None or not record.group:
            return None
        return cgroups.Group(self.rights.groups, record.group)

    def _start(self, record: Record, spec: SandboxSpec, patience: Patience) -> Record:
        directory = self.files.directory(record.handle.key)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(ours)
            stack.enter_context(theirs)
            listener = stack.enter_context(unix_channel.listening(directory, SOCKET))
            log = stack.enter_context((directory / LOG).open("ab"))
            configuration = self.view.configuration(record.handle.sandbox_id, spec, listener.fileno())
            inside = (theirs, listener)
            held = self._hold(record, spec.limits, self.view.command(theirs.fileno()), inside, log, patience)
            try:
                for channel in inside:
                    channel.close()
                record = self._admit(record, held.init, spec.limits)
                held.release()
                bwrap_process.deliver(configuration, ours, patience)
                if not record.running():
                    raise ProcessLookupError
                patience.cancel.check()
            except BaseException as error:
                held.abandon()
                if isinstance(error, ProcessLookupError):  # at whatever step: it has ended by itself
                    raise bwrap_process.failure(directory / LOG) from None
                raise
        with self._lock:
            self.outers[record.handle.sandbox_id] = held.outer
        return record

    def _hold(
        self,
        record: Record,
        limits: Limits,
        command: list[str],
        inside: tuple[socket.socket, ...],
        log: IO[bytes],
        patience: Patience,
    ) -> bwrap_process.Bubblewrap:
        """Starts bubblewrap up to where `command` would begin, with the sockets of `inside`."""
        fds = [channel.fileno() for channel in inside]
        with self._filter() as filters, self._shown(self.workspaces.data(record.handle.workspace), limits) as data:
            arguments = [*self.view.arguments(limits), "--bind", str(data), DATA]
            if filters is not None:
                arguments += ["--seccomp", str(filters)]
            arguments += ["--remount-ro", "/", "--chdir", "/", "--", *command]
            return bwrap_process.start(
                self.binary,
                arguments,
                self._birth(record),
                fds=fds if filters is None else [*fds, filters],
                log=log,
                patience=patience,
            )

    @contextlib.contextmanager
    def _filter(self) -> Iterator[int | None]:
        """A descriptor from which bubblewrap reads the system call filter."""
        if self.settings.seccomp is None:
            yield None
            return
        descriptor = os.memfd_create("filter", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self.settings.seccomp)
            os.lseek(descriptor, 0, os.SEEK_SET)
            yield descriptor
        finally:
            os.close(descriptor)

    def _identity(self, uid: int) -> bwrap_process.Birth:
        return contextlib.nullcontext() if self.rights is None else self.rights.guise.worn(uid)

    @contextlib.contextmanager
    def _birth(self, record: Record) -> Iterator[int | None]:
        """In which bubblewrap is started: with the sandbox's uid and, where that can be, in its control group."""
        group = self._group(record)
        with group.entered() if group is not None else contextlib.nullcontext(), self._identity(record.uid) as uid:
            yield uid

    def _admit(self, record: Record, init: Process, limits: Limits) -> Record:
        """Binds the held back PID 1: control group, limits, uid, record. Only then may it run."""
        record = record.started(init)
        if (group := self._group(record)) is not None:
            group.add(init.pid)
            group.limit_cpu(limits)
        # Of its own processes: a root host in a container may lack the right to limit another uid's.
        with self._identity(record.uid):
            bwrap_process.limit(init.pid, limits, processes=self.view.process_limits)
        if self.rights is not None:
            self.rights.uids.hold(record.uid, record.handle.sandbox_id, init)
        self.files.write(record)
        return record

    def _shown(self, data: Path, limits: Limits | None = None) -> contextlib.AbstractContextManager[Path]:
        """A workspace's data under a path that the sandbox's uid can reach, until bubblewrap has its own view; with
        `limits`, directories in memory too."""
        if self.rights is None:
            return contextlib.nullcontext(data)
        in_memory: dict[str, str] = {}
        if limits is not None:
            in_memory = dict(zip(IN_MEMORY, map(tmpfs_options, tmpfs_sizes(limits)), strict=True))
        return self.rights.stage.showing(data, in_memory)

    # --- looking -------------------------------------------------------------------------------------------------

    def lookup(self, key: str) -> Handle | None:
        record = self.files.read(key)
        return record.handle if record is not None and self._ours(record) and record.running() else None

    def running(self, handle: Handle) -> Record:
        """The record of a running sandbox. Raises StateLost when it is not this one, or does not run."""
        record = self._record(handle)
        if record is None or not record.running():
            raise StateLost("the sandbox is not running any more", sandbox=handle.sandbox_id)
        return record

    def poll(self, handle: Handle) -> Status:
        record = self._record(handle)
        if record is None:
            return Status(Life.GONE)
        if record.running():
            return Status(Life.RUNNING)
        group = self._group(record)
        kills = (group.usage().oom_kills or 0) if group is not None else 0
        outer = self.outers.get(handle.sandbox_id)
        code = outer.poll() if outer is not None else None
        said = ["its PID 1 has ended" if code is None else f"its PID 1 has ended with exit code {code}"]
        if kills:
            said.append(f"{kills} processes were killed because memory was full")
        return Status(Life.ENDED, ", ".join(said), out_of_memory=kills > 0)

    def usage(self, handle: Handle) -> Usage:
        record = self.running(handle)
        group = self._group(record)
        used = group.usage() if group is not None else Usage()
        if used.memory_bytes is not None and used.processes is not None and used.cpu_s is not None:
            return used
        assert record.init is not None  # it is running
        seen = proc_tree.usage(record.init.pid)
        return Usage(
            memory_bytes=seen.memory_bytes if used.memory_bytes is None else used.memory_bytes,
            cpu_s=seen.cpu_s if used.cpu_s is None else used.cpu_s,
            processes=seen.processes if used.processes is None else used.processes,
            oom_kills=used.oom_kills,
        )

    def list_owned(self) -> list[Handle]:
        """What another thread or process is just starting is not listed: it is that one's to remove."""
        return [record.handle for record in self.files.all() if self._ours(record) and not record.starting()]

    def _record(self, handle: Handle) -> Record | None:
        record = self.files.read(handle.key)
        if record is None or not self._ours(record) or record.handle.sandbox_id != handle.sandbox_id:
            return None
        return record if handle.instance in ("", record.handle.instance) else None

    def _ours(self, record: Record) -> bool:
        return record.owner == self.settings.owner.id

    # --- removing ------------------------------------------------------------------------------------------------

    def destroy(self, handle: Handle, *, keep_workspace: bool) -> None:
        with exhaustion(), self.files.locked(handle.key, LOCK_S):
            record = self.files.read(handle.key)
            if record is not None and record.handle.sandbox_id == handle.sandbox_id:
                self._check_owner(record)
                self._remove(record, keep_workspace=keep_workspace)
                return
        if not keep_workspace and not self._in_use(handle.workspace):
            self._discard(handle.workspace)

    def remove_workspace(self, workspace: str) -> None:
        with exhaustion():
            if self._in_use(workspace):
                raise BackendError(f"workspace {workspace} is in use by a running sandbox; destroy that first")
            self._discard(workspace)

    def _in_use(self, workspace: str) -> bool:
        return any(
            record.handle.workspace == workspace and (record.running() or record.starting())
            for record in self.files.all()
        )

    def _check_owner(self, record: Record) -> None:
        if not self._ours(record):
            raise BackendError("this sandbox belongs to another host", sandbox=record.handle.sandbox_id)

    def sweep(self) -> None:
        """Removes what an interrupted launch or removal has left and no record names. Raises OSError."""
        for path in self.files.sandboxes.iterdir():
            if self.files.read(path.name) is None:
                with self.files.locked(path.name, LOCK_S):
                    if self.files.read(path.name) is None:
                        self.files.remove(path.name)
        for path in self.workspaces.discarded():
            self._empty(path)
        self.files.sweep_locks()

    def _remove(self, record: Record, *, keep_workspace: bool) -> None:
        """Ends it and unmakes everything, the record last. Raises EngineUnavailable, OSError."""
        handle = record.handle
        if record.init is not None and not record.init.kill(bwrap_process.KILL_S):
            raise EngineUnavailable("the sandbox's PID 1 does not end", sandbox=handle.sandbox_id)
        with self._lock:
            outer = self.outers.pop(handle.sandbox_id, None)
        if outer is not None:
            bwrap_process.end(outer)
        group = self._group(record)
        if group is not None and not group.remove(bwrap_process.KILL_S):
            raise EngineUnavailable("processes of the sandbox do not end", sandbox=handle.sandbox_id)
        if not keep_workspace:
            self._discard(handle.workspace)
        if self.rights is not None:
            self.rights.uids.release(record.uid, handle.sandbox_id)
        self.files.remove(handle.key)

    def _discard(self, workspace: str) -> None:
        path = self.workspaces.discard(workspace)
        if path is not None:
            self._empty(path)

    def _empty(self, path: Path) -> None:
        """Removes a discarded workspace from within a sandbox that sees only it, with rights over all of its files."""
        for data in path.iterdir():
            uid = data.lstat().st_uid
            with self._shown(data) as source:
                bwrap_process.run(
                    [
                        *(str(self.binary), *REMOVER, *system_arguments()),
                        *("--bind", str(source), "/remove", "--chdir", "/remove", "--"),
                        *("find", ".", "-xdev", "-mindepth", "1", "-delete"),
                    ],
                    self._identity(uid),
                    REMOVE_S,
                )
        self.workspaces.removed(path)


@contextlib.contextmanager
def exhaustion() -> Iterator[None]:
    """Turns an OSError into NoCapacity, when the machine has run out of something, or into EngineUnavailable."""
    try:
        yield
    except OSError as error:
        kind = NoCapacity if error.errno in EXHAUSTED else EngineUnavailable
        raise kind(f"the machine refused: {error.strerror}") from error
