"""Session records: how one in memory and one in the store become one, and how a host alone keeps them.

Above: `keeper`. `replicas` does the same where several hosts share the store. Below: `session`, the store.
"""

from __future__ import annotations

import dataclasses

from sandboxes.errors import NodeGone, SandboxError, StoreConflict
from sandboxes.lifecycle import OVER, CloseReason, Phase
from sandboxes.session import Session
from sandboxes.stores.base import SessionRecord, Store

FILES_KEPT = "variables are lost, files are kept"
FILES_GONE = "variables and files are gone"
MOVED = f"the sandbox's node is gone; {FILES_GONE}"


def over(record: SessionRecord) -> bool:
    """Whether it is closing or closed."""
    return record.closed_at is not None or record.phase in OVER


def merged(base: SessionRecord, mine: SessionRecord, theirs: SessionRecord) -> SessionRecord:
    """What both have changed since `base`, with the version of `theirs`. Pure.

    Counts add up and the later one wins. Where both have changed what the session runs on, `theirs` stands: it is in
    the store, and was put there by a compare-and-set. A session that is over stays so.
    """
    if over(theirs) and theirs.closed_at is None and mine.closed_at is not None:
        return dataclasses.replace(mine, version=theirs.version)
    if over(theirs):
        return theirs
    ttls = [ttl for ttl in (mine.ttl_s, theirs.ttl_s) if ttl is not None]
    both = dataclasses.replace(
        theirs,
        epoch=max(mine.epoch, theirs.epoch),
        sequence=max(mine.sequence, theirs.sequence),
        calls=theirs.calls + mine.calls - base.calls,
        last_used_at=max(mine.last_used_at, theirs.last_used_at),
        ttl_s=min(ttls, default=None),
    )
    if theirs.lost_reason == base.lost_reason:
        both = dataclasses.replace(both, lost_reason=mine.lost_reason)
    if over(mine):
        both = dataclasses.replace(both, phase=mine.phase)
    if _runs_on(theirs) == _runs_on(base):
        both = dataclasses.replace(both, phase=mine.phase, handle=mine.handle, workspace=mine.workspace, node=mine.node)
    return dataclasses.replace(both, close_reason=mine.close_reason, closed_at=mine.closed_at)


def _runs_on(record: SessionRecord) -> tuple[object, ...]:
    return record.phase, record.handle, record.workspace, record.node


def files_gone(lost_reason: str | None) -> str:
    """What the next outcome says when the sandbox turned out to be on another node than the files."""
    if lost_reason is None:
        return MOVED
    return lost_reason.removesuffix(FILES_KEPT) + FILES_GONE if lost_reason.endswith(FILES_KEPT) else lost_reason


def lost_fate(error: SandboxError | None) -> str:
    """What is left after a sandbox was lost by this."""
    return FILES_GONE if isinstance(error, NodeGone) else FILES_KEPT


def same_node(one: str, other: str) -> bool:
    """Whether two handles' nodes are one life of one node. A name may have the node's address before a last slash: it
    changes when the node's own host starts again."""
    return one.rpartition("/")[2] == other.rpartition("/")[2]


def newest_phase(record: SessionRecord) -> Phase:
    """Where a session is that is taken up from its record: with its sandbox, if it has one."""
    if record.handle is not None:
        return Phase.IDLE
    return Phase.NEW if record.phase == Phase.NEW else Phase.LOST


class Records:
    """One host alone has its store: what it has in memory is what is the case."""

    shared = False

    def __init__(self, store: Store) -> None:
        self._store = store

    async def write(self, session: Session) -> None:
        """Commits the record once. Raises StoreConflict, StoreUnavailable."""
        version = session.record.version
        try:
            written = await self._store.put(session.current(), expected_version=version or None)
        except StoreConflict:
            session.dirty = True
            stored = await self._store.get(session.key)
            if stored is None or stored.incarnation != session.record.incarnation:
                raise
            session.record = dataclasses.replace(session.record, version=stored.version)
            if stored.version == version:
                raise
        else:
            session.record = dataclasses.replace(session.record, version=written.version)

    async def reload(self, session: Session) -> bool:
        """Takes in what the store says. Whether the session is open still. Raises StoreUnavailable."""
        return session.phase not in OVER

    async def looked(self, session: Session, error: SandboxError) -> None:
        """`reload` after an error, if that tells more. Never raises."""

    async def hold(self, session: Session) -> bool:
        """The session is about to be used here. False: it is over, and the next one is to be used."""
        return True

    async def settle_hold(self, session: Session) -> None:
        """The session is held as it is used here now. Raises StoreUnavailable."""

    async def alone(self, session: Session) -> bool:
        """Whether no other host that lives has the session in use. Raises StoreUnavailable."""
        return True

    async def fresh(self, session: Session, resource: str) -> bool:
        """Whether no other host has written the resource since it was read here. Raises StoreUnavailable."""
        return True

    def saved(self, session: Session, resource: str) -> None:
        """The resource was written here."""

    def asks(self, session: Session, reason: CloseReason) -> bool:
        """Whether it is for all hosts to say if the session closes (`leave`)."""
        return False

    async def leave(self, session: Session, reason: CloseReason) -> bool:
        """Whether it closes; then that is committed, and no other host closes it. Raises StoreUnavailable."""
        return True

    async def closing(self, session: Session) -> bool:
        """Whether it is for this host to end what the session has. Commits that it is. Raises StoreUnavailable."""
        return True
