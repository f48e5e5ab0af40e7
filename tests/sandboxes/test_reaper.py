"""What a sweep decides, apart from doing it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.admission import Slot
from sandboxes.lifecycle import CloseReason, Phase
from sandboxes.reaper import due, eviction_order
from sandboxes.session import Session
from sandboxes.settings import ManagerSettings
from sandboxes.spec import KeyKind, Retention, SessionKey
from sandboxes.testing.store_suite import record_of

SETTINGS = ManagerSettings(idle_s=100.0, lifetime_s=1000.0, evict_after_s=10.0, evict_retained_after_s=30.0)


def session(
    ident: str = "a",
    *,
    principal: str = "alice",
    retention: Retention = Retention.CHOSEN,
    phase: Phase = Phase.IDLE,
    used: float = 0.0,
    ttl_s: float | None = None,
) -> Session:
    key = SessionKey(principal, KeyKind.REQUEST, ident)
    record = record_of(
        key, ident, retention=retention, phase=phase.value, created_at=0.0, last_used_at=used, ttl_s=ttl_s
    )
    made = Session(record, lambda session, changed: None)
    made.slot = Slot(principal)
    return made


def test_the_first_reason_that_holds_is_given() -> None:
    assert due(session(), 99.0, SETTINGS) is None
    assert due(session(), 100.0, SETTINGS) is CloseReason.IDLE
    assert due(session(used=990.0), 1000.0, SETTINGS) is CloseReason.LIFETIME
    assert due(session(ttl_s=5.0), 6.0, SETTINGS) is CloseReason.IDLE
    assert due(session(phase=Phase.CLOSING), 5000.0, SETTINGS) is None


def test_a_session_that_is_attached_has_no_grace_to_end() -> None:
    gone = session()
    gone.grace_until = 30.0
    assert due(gone, 29.0, SETTINGS) is None
    assert due(gone, 30.0, SETTINGS) is CloseReason.DISCONNECT
    gone.attached.add(object())
    assert due(gone, 31.0, SETTINGS) is None


SESSIONS = st.lists(
    st.builds(
        session,
        st.uuids().map(str),
        principal=st.sampled_from(["alice", "bob", "carol"]),
        retention=st.sampled_from(Retention),
        phase=st.sampled_from([Phase.IDLE, Phase.RUNNING, Phase.STARTING]),
        used=st.integers(0, 100).map(float),
    ),
    max_size=12,
)


@given(SESSIONS, st.booleans(), st.integers(1, 6))
def test_eviction_spares_who_works_who_was_just_here_and_others_fair_shares(
    sessions: list[Session], capped: bool, share: int
) -> None:
    order = eviction_order(sessions, "alice", capped=capped, now=100.0, settings=SETTINGS, fair_share=share)
    for victim in order:
        assert victim.phase is Phase.IDLE
        assert victim.used_at <= (70.0 if victim.retention is Retention.RETAINED else 90.0)
        if victim.key.principal != "alice":
            assert not capped
            assert victim.retention is not Retention.RETAINED
            assert sum(other.key.principal == victim.key.principal for other in sessions) > share
    retained = [victim.retention is Retention.RETAINED for victim in order]
    assert retained == sorted(retained), "they go last"
    own = [victim.key.principal == "alice" for victim in order if victim.retention is not Retention.RETAINED]
    assert own == sorted(own, reverse=True)


def test_a_retained_session_that_idles_for_a_minute_is_not_taken_from_the_users_of_one_inference_server() -> None:
    settings = ManagerSettings()
    kept = session("kept", retention=Retention.RETAINED, used=0.0)
    request = session("request", retention=Retention.REQUEST, used=100.0)

    def order(now: float) -> list[str]:
        found = eviction_order([kept, request], "alice", capped=True, now=now, settings=settings, fair_share=1)
        return [victim.key.id for victim in found]

    assert order(61.0) == []
    assert order(599.0) == ["request"]
    assert order(600.0) == ["request", "kept"]
