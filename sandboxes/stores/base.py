"""The contract of a store: session records, resources and receipts, with compare-and-set on a session's version.

Above: `manager` and `reaper`. Below: SQLite, memory, Redis. A `SharedStore` serves several hosts (replicas) at once.
Methods are coroutines and may raise StoreUnavailable (disk full, locked). A method that returned has committed: it
survives `kill -9` of the process. Nothing is half written.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sandboxes.spec import Handle, Outcome, Receipt, Retention, SessionKey


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is kept of a session. `phase` is a name of `lifecycle`'s table; `version` is raised by every write.

    `epoch` and `sequence` are the last ones given out. `handle` is None when it has no sandbox. `lost_reason` waits to
    be told with the next outcome. `node` is where its files are. `incarnation` tells a session from an earlier, closed
    one of the same key.
    """

    key: SessionKey
    retention: Retention
    phase: str
    incarnation: str
    created_at: float
    last_used_at: float
    ttl_s: float | None = None
    epoch: int = 0
    sequence: int = 0
    handle: Handle | None = None
    workspace: str | None = None
    node: str = ""
    lost_reason: str | None = None
    closed_at: float | None = None
    close_reason: str | None = None
    calls: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt as the ledger knows it. `outcome` is None while it runs, and after its text was pruned."""

    session: SessionKey
    incarnation: str
    attempt_id: str
    digest: str
    registered_at: float
    receipt: Receipt | None = None
    outcome: Outcome | None = None
    pruned: bool = False


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to list; None matches all."""

    principal: str | None = None
    phases: frozenset[str] | None = None
    include_closed: bool = False
    limit: int = field(default=1000)

    def matches(self, record: SessionRecord) -> bool:
        """Whether a record is one of these, `limit` aside."""
        return (
            (self.include_closed or record.closed_at is None)
            and (self.principal is None or record.key.principal == self.principal)
            and (self.phases is None or record.phase in self.phases)
        )


class Store(abc.ABC):
    """Where sessions survive their host."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Called once. Raises StoreUnavailable with what to do (a damaged file is named, never silently replaced)."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Called once, at the end. Never raises."""

    @abc.abstractmethod
    async def get(self, key: SessionKey) -> SessionRecord | None:
        """The newest record of this key, closed or not."""

    @abc.abstractmethod
    async def put(self, record: SessionRecord, *, expected_version: int | None) -> SessionRecord:
        """Writes if the stored version is `expected_version` (None: there must be no open record of this key).

        Returns the record with its new version. A record with `closed_at` closes it: its resources are removed.
        Raises StoreConflict.
        """

    @abc.abstractmethod
    async def list(self, which: SessionFilter) -> Sequence[SessionRecord]:
        """Newest use first."""

    @abc.abstractmethod
    async def register(self, attempt: AttemptRecord) -> AttemptRecord:
        """Records an attempt before it runs. When its id is known in this session, returns the known one instead."""

    @abc.abstractmethod
    async def settle(self, *attempts: AttemptRecord) -> None:
        """Commits the one outcome of each attempt (`attempt.outcome`), together, and registers those that are not yet.

        The first outcome stays; the same again changes nothing. Raises ValueError without an outcome.
        """

    @abc.abstractmethod
    async def attempt(self, key: SessionKey, attempt_id: str) -> AttemptRecord | None:
        """One attempt of this key, of whichever incarnation: an id stays taken when its session has closed."""

    @abc.abstractmethod
    async def attempts(self, key: SessionKey, *, limit: int = 100, unsettled: bool = False) -> Sequence[AttemptRecord]:
        """Newest first; `unsettled`: only those without an outcome."""

    @abc.abstractmethod
    async def put_parts(self, key: SessionKey, resource: str, parts: Mapping[str, bytes | None]) -> None:
        """Keeps parts of a resource's state beside its session, all of these or none; None removes one."""

    @abc.abstractmethod
    async def get_parts(self, key: SessionKey, resource: str) -> Mapping[str, bytes]:
        """All parts of a resource of the open incarnation of this key; empty when there are none."""

    @abc.abstractmethod
    async def prune(self, *, closed_before: float, outcomes_before: float) -> int:
        """Forgets closed sessions' records, and the texts of outcomes, older than that. Returns how many rows."""


class SharedStore(Store):
    """A store that several replicas use at once, and by which they know of each other.

    A replica lives as long as it beats. It holds a session while connections are attached to it there, or a call of it
    runs there. The hold of a replica that is dead counts for nothing.
    """

    @abc.abstractmethod
    async def beat(self, replica: str, ttl_s: float, said: Mapping[str, object]) -> bool:
        """This replica lives for so long from now, and says this of itself (JSON values).

        Returns whether it lived until now.
        """

    @abc.abstractmethod
    async def leave(self, replica: str) -> None:
        """This replica stops: its holds count no more."""

    @abc.abstractmethod
    async def replicas(self) -> Mapping[str, Mapping[str, object]]:
        """What those that live have said of themselves."""

    @abc.abstractmethod
    async def hold(self, key: SessionKey, incarnation: str, replica: str, *, attached: bool) -> bool:
        """Whether it is held now: False when this incarnation is closing or closed, and then nothing has changed."""

    @abc.abstractmethod
    async def release(self, key: SessionKey, replica: str) -> None:
        """The replica holds it no longer. Idempotent."""

    @abc.abstractmethod
    async def holders(self, key: SessionKey, *, dead: bool = False) -> Mapping[str, bool]:
        """The replicas that hold it and live (`dead`: that do not); whether with connections attached."""

    @abc.abstractmethod
    async def put_alone(self, record: SessionRecord, *, expected_version: int, replica: str) -> SessionRecord:
        """`put`, unless another replica that lives holds the session with connections attached.

        The own hold ends in the same moment, also when it raises: of several that leave, the last one gets through.
        Raises SessionHeld, StoreConflict.
        """

    @abc.abstractmethod
    async def parts_version(self, key: SessionKey, resource: str) -> int:
        """Raised by every `put_parts` of this resource; 0: there was none in this session."""
