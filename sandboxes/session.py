"""A session: its record, its place in the lifecycle, who is attached, what runs and waits, and its named resources.

Above: `manager` and its parts, which perform. Below: `lifecycle`, `spec`, `sandbox`, `stores.base`.
Only the event loop's thread touches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sandboxes.admission import Slot
from sandboxes.errors import SandboxError, SessionUnknown
from sandboxes.events import ExecutionEvent, OnEvent
from sandboxes.lifecycle import OVER, Changed, Lifecycle, Phase, Transition
from sandboxes.resources import Resource
from sandboxes.sandbox import Sandbox
from sandboxes.spec import Execution, Outcome, Retention, SessionKey, Usage
from sandboxes.stores.base import SessionRecord


@dataclass(eq=False, slots=True)
class Run:
    """One attempt in this process: it waits its turn, runs, or waits for the ledger to have it."""

    attempt_id: str
    digest: str
    execution: Execution | None  # None: taken over from before a restart
    queued_at: float
    task: asyncio.Task[Outcome] | None = None
    waiters: int = 0
    listeners: list[OnEvent] = field(default_factory=list)
    registered: bool = False  # it may run, or has; before that it can be taken back
    fresh: bool = False  # the ledger did not have it before: it has run nowhere yet
    cancelled: str = ""  # why it is to end: "cancel", where nobody wants it any more, or "operator"
    inside: Sandbox | None = None  # where it was sent, until it has come back: a cancel goes there
    outcome: Outcome | None = None
    watchers: list[asyncio.Future[None]] = field(default_factory=list)  # told when the task is over

    def wake(self) -> None:
        """Lets those go on who wait for the task; it is over, or in its last step."""
        for watcher in self.watchers:
            if not watcher.done():
                watcher.set_result(None)
        self.watchers.clear()

    def emit(self, event: ExecutionEvent) -> None:
        for listener in self.listeners:
            listener(event)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session for operators: what is recorded, and what is the case now."""

    record: SessionRecord
    phase: Phase
    attached: int = 0
    waiting: int = 0
    running: str | None = None  # attempt id
    usage: Usage | None = None
    sandbox: str | None = None  # what people find it by

    @property
    def live(self) -> SessionRecord:
        """The record, with the phase that is the case now."""
        return dataclasses.replace(self.record, phase=self.phase.value)


class Session:
    """See the module. `closed` is set when it is over; `ended` is called with every transition."""

    def __init__(self, record: SessionRecord, on_change: Callable[[Session, Changed], None]) -> None:
        self.record = record
        self.here_at = 0.0  # when this host last used it
        self.used_at = record.last_used_at  # later than the record's until that is saved
        self.life = Lifecycle(str(record.key), Phase(record.phase))
        self.sandbox: Sandbox | None = None
        self.slot: Slot | None = None
        self.attached: set[object] = set()
        self.grace_until: float | None = None
        self.turn = asyncio.Lock()
        self.queue: list[Run] = []
        self.runs: dict[str, Run] = {}
        self.running: Run | None = None
        # Attempts whose connection was lost, to be collected for the ledger; and why they are to end, if they are.
        self.astray: dict[str, str] = {}
        self.resources: dict[str, Resource] = {}
        self.resource_lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.dirty = False
        self.disposal: asyncio.Task[None] | None = None  # of a lost sandbox, before another is started
        self.lost_epoch = 0  # `lost_reason` is of this one's end, where it is known: a later one tells
        self.losses_open = False  # the ledger could not be told yet what a lost sandbox took with it
        self.closed = asyncio.Event()
        self.end_note: str | None = None  # what a call that is cut off by the closing is told
        # Where several hosts share the store (see `replicas`):
        self.stored = record  # as it was last read from the store, or written there
        self.held: bool | None = None  # held in the store: with connections attached; None: not held
        self.unclear = False  # attempts of a host that is gone may be in its sandbox
        self.leaving: asyncio.Task[object] | None = None  # whether it may be closed is being asked
        self.ends: bool | None = None  # whether it is this host that ends what a closing session has; None: not known
        self.gone = ""  # the sandbox id on record that turned out to be gone, before another is started
        self.dropped = False  # this copy is not used any more; the session goes on elsewhere
        self.versions: dict[str, int] = {}  # of resources
        self._on_change = on_change

    @property
    def key(self) -> SessionKey:
        return self.record.key

    @property
    def claim(self) -> str:
        """What its sandbox's ticket names: the key and the incarnation, so that a sandbox of an earlier session of
        the same key is never taken for this one's."""
        return claim_text(self.record)

    @property
    def retention(self) -> Retention:
        return self.record.retention

    @property
    def phase(self) -> Phase:
        return self.life.phase

    @property
    def busy(self) -> bool:
        """Whether a call of it runs or waits."""
        return self.running is not None or bool(self.queue)

    def change(self, transition: Transition, reason: str = "") -> None:
        """Makes a transition. Raises IllegalTransition."""
        changed = self.life.apply(transition, reason)
        if transition not in (Transition.CALL, Transition.DONE):  # these are not recorded: the agent knows them
            self.update(phase=changed.target.value)
        self._on_change(self, changed)

    @contextlib.contextmanager
    def until_closed(self) -> Iterator[None]:
        """For work with its sandbox. What fails because the session was closed meanwhile raises SessionUnknown, as it
        would have a moment later."""
        try:
            yield
        except SandboxError as error:
            if self.phase not in OVER or isinstance(error, SessionUnknown):
                raise
            raise SessionUnknown("the session was closed meanwhile", session=str(self.key)) from error

    def touch(self, now: float) -> None:
        """It is used now."""
        self.used_at = self.here_at = now
        self.dirty = True

    def current(self) -> SessionRecord:
        """The record as it is to be saved."""
        return dataclasses.replace(self.record, last_used_at=max(self.used_at, self.record.last_used_at))

    def update(self, **fields: object) -> None:
        """Changes the record in memory; `dirty` until it was saved."""
        self.record = dataclasses.replace(self.record, **fields)  # type: ignore[arg-type]  # named fields of a record
        self.dirty = True

    def info(self, usage: Usage | None = None, sandbox: str | None = None) -> SessionInfo:
        return SessionInfo(
            record=self.current(),
            phase=self.phase,
            attached=len(self.attached),
            waiting=len(self.queue),
            running=self.running.attempt_id if self.running else None,
            usage=usage,
            sandbox=sandbox,
        )


def claim_text(record: SessionRecord) -> str:
    """See `Session.claim`."""
    return f"{record.key} {record.incarnation}"
