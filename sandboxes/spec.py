"""Frozen data that crosses the rooms of this package: keys, limits, calls, receipts and outcomes.

Above: every module here and `toolhost`. Below: the standard library only.
Times are seconds since the epoch (`float`), durations seconds (`float`), sizes bytes (`int`), unless a name says
otherwise.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


class KeyKind(enum.StrEnum):
    """Where a session's id comes from. Ids of different kinds never meet, even when equal."""

    REQUEST = "request"  # `x-session-id`: chosen by the inference server or its client
    RETAINED = "retained"  # `x-toolhost-session` or `/s/{session}`: a bearer secret
    CONNECTION = "connection"  # minted per connection for clients that send no id


class Retention(enum.StrEnum):
    """What ends a session, besides its idle time, its lifetime and the operator."""

    REQUEST = "request"  # its clean-up; a lost connection after the grace
    CHOSEN = "chosen"  # its clean-up; a lost connection does not
    RETAINED = "retained"  # neither: a clean-up only detaches
    CONNECTION = "connection"  # its clean-up; its connection's end, at once


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """What a session is named by. Two principals never share a key.

    `principal`: who authenticated ("anonymous" without authentication); `id`: 1 to 128 of `A-Z a-z 0-9 . _ : -`.
    """

    principal: str
    kind: KeyKind
    id: str

    def __str__(self) -> str:
        return f"{self.principal}/{self.kind.value}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> SessionKey:
        """The inverse of `str()`. Raises ValueError. A principal may contain slashes; the last two parts may not."""
        principal, kind, ident = text.rsplit("/", 2)
        return cls(principal, KeyKind(kind), ident)

    def digest(self) -> str:
        """32 hex characters that stand for this key where its text must not appear (engine labels, file names)."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """How a client asks for a session. `ttl_s` narrows a retained session's idle time; it never widens a setting."""

    key: SessionKey
    retention: Retention
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use. A backend enforces what it can and names the rest in its `differences`."""

    memory_bytes: int = 1 << 30
    cpus: float = 1.0
    processes: int = 256
    disk_bytes: int = 2 << 30
    tmp_bytes: int = 128 << 20
    shm_bytes: int = 64 << 20
    open_files: int = 1024


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to isolate. The session is not in it: a pooled sandbox learns its session later, by its ticket.

    `egress`: "none", or the name of a network that the backend knows. `preimports`: modules the interpreter loads
    before it is ready. `environment`: variables for user code.
    """

    limits: Limits = field(default_factory=Limits)
    egress: str = "none"
    preimports: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one running sandbox. Plain data: it is stored and comes back after a restart.

    `key` is what it was launched under, `sandbox_id` what this launch was given (a ticket is bound to it),
    `instance` tells a replaced sandbox from its predecessor, `node` where it runs ("" is this machine),
    `workspace` names its `/mnt/data`.
    """

    backend: str
    key: str
    sandbox_id: str
    instance: str
    workspace: str
    node: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses now: memory in bytes, cpu seconds since its start, processes. None: not known."""

    memory_bytes: int | None = None
    cpu_s: float | None = None
    processes: int | None = None
    oom_kills: int | None = None


# --- calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PythonCall:
    """Run `code` in the session's interpreter."""

    code: str

    def arguments(self) -> dict[str, object]:
        return {"code": self.code}


@dataclass(frozen=True, slots=True)
class ShellCall:
    """Run a command in the session's sandbox, or in one of its persistent shells.

    `cmd`: a list is executed as it is, without a shell; a string is given to `sh -c`, or to the named shell.
    """

    cmd: tuple[str, ...] | str
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shell: str | None = None
    user: str | None = None

    def arguments(self) -> dict[str, object]:
        cmd = self.cmd if isinstance(self.cmd, str) else list(self.cmd)
        return {
            "cmd": cmd,
            "workdir": self.workdir,
            "env": dict(sorted(self.env.items())),
            "shell": self.shell,
            "user": self.user,
        }


_canonical = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True, slots=True)
class Execution:
    """One run that a caller asks for.

    `attempt_id` is minted by the caller, never the model's call id (models repeat those); empty: the host mints one.
    `timeout_s` counts from when the code starts; None is the setting. `max_characters` caps the text of the outcome.
    """

    call: PythonCall | ShellCall
    attempt_id: str = ""
    timeout_s: float | None = None
    max_characters: int | None = None

    def digest(self) -> str:
        """SHA-256 (hex) over the kind of call and its arguments: one attempt id with another digest is a conflict."""
        kind = "python" if isinstance(self.call, PythonCall) else "shell"
        text = _canonical([kind, self.call.arguments()])
        return hashlib.sha256(text.encode()).hexdigest()


# --- what comes back -----------------------------------------------------------------------------------------------


class Ending(enum.StrEnum):
    """How an execution ended."""

    OK = "ok"
    RAISED = "raised"  # the code raised, or a command's exit code is not 0
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"  # cancelled; whether variables survived is the state's to say
    KILLED = "killed"  # the interpreter died: a signal, its own exit, out of memory
    LOST = "lost"  # the sandbox died while it ran
    NEVER_STARTED = "never_started"


class State(enum.StrEnum):
    """The fate of the variables."""

    KEPT = "kept"
    LOST = "lost"


class CauseKind(enum.StrEnum):
    """Why an execution ended otherwise than by its own last line. A closed list: hostile frames pick from it."""

    DEADLINE = "deadline"
    CANCEL = "cancel"
    SIGNAL = "signal"
    EXIT = "exit"
    OUT_OF_MEMORY = "out_of_memory"
    OPERATOR = "operator"
    SANDBOX_LOST = "sandbox_lost"
    TRANSPORT_LOST = "transport_lost"
    SESSION_CLOSED = "session_closed"  # by clean-up, the operator, a limit: a note says by what


class Rung(enum.StrEnum):
    """Which rung of the ladder ended it: interrupt, 2 s, interrupt again, 2 s, kill the process group."""

    FIRST_INTERRUPT = "first_interrupt"
    SECOND_INTERRUPT = "second_interrupt"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Cause:
    kind: CauseKind
    rung: Rung | None = None
    signal: int | None = None
    exit_code: int | None = None
    limit: float | None = None  # seconds for DEADLINE, bytes for OUT_OF_MEMORY


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is left of every execution: in the result's `_meta`, in the ledger, and in the text where needed.

    `session` is `str(SessionKey)`; `started_at` is None when it never started.
    """

    session: str
    epoch: int
    sequence: int
    attempt_id: str
    digest: str
    queued_at: float
    started_at: float | None
    ended_at: float
    ending: Ending
    state: State
    bytes_out: int = 0
    bytes_cut: int = 0
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Text that was written to stdout and stderr, in order. `cut_characters` were left out between head and tail;
    `file` then names where the whole is inside the sandbox (itself capped: `file_complete` is False when it was)."""

    head: str = ""
    tail: str = ""
    cut_characters: int = 0
    file: str | None = None
    file_complete: bool = True


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that an execution saved, by its path inside the sandbox."""

    path: str
    mime: str


@dataclass(frozen=True, slots=True)
class FileRef:
    """A file that an execution made or changed below `/mnt/data`, by its path inside the sandbox."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The one defined result of an execution. Everything in it but the receipt was said by user code.

    `value`: text of the last expression. `error`: the traceback. `background`: output that arrived after the
    previous execution had ended. `exit_code`: of a shell call. `notes`: remarks of the agent or the host for the model,
    in plain sentences. `state_lost_before`: why the session began anew before this execution ran, if it did.
    """

    receipt: Receipt
    output: Output = field(default_factory=Output)
    value: str | None = None
    error: str | None = None
    background: Output | None = None
    images: tuple[ImageRef, ...] = ()
    files: tuple[FileRef, ...] = ()
    exit_code: int | None = None
    notes: tuple[str, ...] = ()
    state_lost_before: str | None = None
