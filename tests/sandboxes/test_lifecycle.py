"""The table of a session's states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import IllegalTransition
from sandboxes.lifecycle import HISTORY, OVER, TABLE, CloseReason, Lifecycle, Phase, Transition


def test_an_ordinary_life_leads_from_new_to_closed() -> None:
    life = Lifecycle("s")
    steps = [Transition.START, Transition.READY, Transition.CALL, Transition.DONE, Transition.CLOSE, Transition.FINISH]
    assert [life.apply(step).target for step in steps] == [
        Phase.STARTING,
        Phase.IDLE,
        Phase.RUNNING,
        Phase.IDLE,
        Phase.CLOSING,
        Phase.CLOSED,
    ]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.IDLE, Phase.RUNNING])
def test_a_lost_sandbox_can_be_started_again(phase: Phase) -> None:
    life = Lifecycle("s", phase)
    assert life.apply(Transition.LOSE, "it died").target is Phase.LOST
    assert life.apply(Transition.START).target is Phase.STARTING


@pytest.mark.parametrize("phase", [Phase.NEW, Phase.LOST, Phase.STARTING, Phase.IDLE, Phase.RUNNING])
def test_every_open_session_can_be_closed(phase: Phase) -> None:
    assert Lifecycle("s", phase).apply(Transition.CLOSE, CloseReason.IDLE).target is Phase.CLOSING


def test_a_refusal_carries_the_history_and_changes_nothing() -> None:
    life = Lifecycle("alice/request/a")
    life.apply(Transition.START)
    with pytest.raises(IllegalTransition) as refused:
        life.apply(Transition.CALL)
    assert refused.value.session == "alice/request/a"
    assert refused.value.history == ("new -start-> starting",)
    assert life.phase is Phase.STARTING


@given(st.lists(st.sampled_from(Transition), max_size=200))
def test_whatever_is_asked_only_the_table_happens(steps: list[Transition]) -> None:
    life = Lifecycle("s")
    for step in steps:
        before, history = life.phase, life.history
        if life.allows(step):
            changed = life.apply(step)
            assert changed.target is life.phase is TABLE[before, step]
            assert life.history[-1] == str(changed)
        else:
            with pytest.raises(IllegalTransition):
                life.apply(step)
            assert (life.phase, life.history) == (before, history)
        assert len(life.history) <= HISTORY
        assert (before in OVER) <= (life.phase in OVER)  # nothing comes back from closing


def test_every_phase_is_reached_and_only_closed_is_an_end() -> None:
    assert set(TABLE.values()) | {Phase.NEW} == set(Phase)
    assert {phase for phase, _ in TABLE} == set(Phase) - {Phase.CLOSED}
