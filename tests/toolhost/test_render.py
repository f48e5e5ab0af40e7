"""The text of a result tells what the model needs, and is never empty."""

from __future__ import annotations

from typing import Any

import pytest

from sandboxes.spec import (
    Cause,
    CauseKind,
    Ending,
    FileRef,
    ImageRef,
    Outcome,
    Output,
    Receipt,
    Rung,
    State,
)
from toolhost.namespaces.render import NOTHING_PRINTED, receipt_meta, render


def outcome(
    ending: Ending = Ending.OK, *, state: State = State.KEPT, cause: Cause | None = None, **fields: Any
) -> Outcome:
    receipt = Receipt("p/request/s", 1, 2, "a", "d", 1.0, 2.0, 3.0, ending, state, cause=cause)
    return Outcome(receipt, **fields)


def test_output_stands_as_written_then_the_value() -> None:
    assert render(outcome(output=Output("a\nb\n"), value="3")) == "a\nb\n3"
    assert render(outcome(output=Output("no newline"), value="3")) == "no newline\n3"
    assert render(outcome(output=Output("  kept  \n"))) == "  kept  \n"


def test_silence_is_said_with_how_to_see_a_value() -> None:
    assert render(outcome()) == NOTHING_PRINTED
    assert "print" in NOTHING_PRINTED
    assert "nothing" in render(outcome(exit_code=0))


def test_a_command_s_exit_code_is_shown() -> None:
    assert render(outcome(Ending.RAISED, exit_code=3, output=Output("no\n"))) == "no\n[Exit code 3.]"
    assert render(outcome(Ending.RAISED, exit_code=3)) == "[Exit code 3.]"


def test_a_traceback_follows_the_output() -> None:
    text = render(outcome(Ending.RAISED, output=Output("before\n"), error="Traceback …\nValueError: x"))
    assert text == "before\nTraceback …\nValueError: x"


def test_what_was_cut_is_counted_and_the_whole_is_named() -> None:
    cut = Output("head", "tail", cut_characters=1234, file="/mnt/data/.outputs/7.txt")
    text = render(outcome(output=cut))
    assert text.startswith("head\n[… 1234 characters cut")
    assert "all of it is in /mnt/data/.outputs/7.txt" in text
    assert text.endswith("\ntail")
    partial = Output("head", "tail", cut_characters=9, file="/mnt/data/.outputs/7.txt", file_complete=False)
    assert "as much as was kept" in render(outcome(output=partial))
    assert "characters cut …]" in render(outcome(output=Output("h", "t", cut_characters=9)))


def test_background_output_is_labelled_and_comes_first() -> None:
    text = render(outcome(background=Output("late\n"), output=Output("now\n")))
    assert text.index("after the previous call") < text.index("late") < text.index("now")


def test_lost_state_is_told_first() -> None:
    text = render(outcome(state_lost_before="the sandbox ended", background=Output("x"), value="1"))
    assert text.startswith("[The earlier state of this session was lost: the sandbox ended. ")


@pytest.mark.parametrize(
    ("rung", "words"),
    [
        (Rung.FIRST_INTERRUPT, ["an interrupt ended it", "Variables and files are kept"]),
        (Rung.SECOND_INTERRUPT, ["second interrupt"]),
        (Rung.KILL, ["killed"]),
    ],
)
def test_a_timeout_tells_its_rung_and_the_fate_of_the_state(rung: Rung, words: list[str]) -> None:
    state = State.LOST if rung is Rung.KILL else State.KEPT
    cause = Cause(CauseKind.DEADLINE, rung=rung, limit=120.0)
    text = render(outcome(Ending.TIMED_OUT, state=state, cause=cause, output=Output("partial\n")))
    assert text.startswith("partial\n[Timed out after 120 s")
    assert all(word in text for word in words)
    assert ("lost; files in /mnt/data are kept" in text) is (state is State.LOST)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (Cause(CauseKind.SIGNAL, signal=11), "killed by signal 11 (SIGSEGV)"),
        (Cause(CauseKind.SIGNAL, signal=999), "killed by signal 999"),
        (Cause(CauseKind.OUT_OF_MEMORY, limit=float(1 << 30)), "out of memory (limit 1024 MiB)"),
        (Cause(CauseKind.EXIT, exit_code=3), "exited with code 3"),
        (None, "unknown reason"),
    ],
)
def test_a_death_tells_its_cause_and_that_files_are_kept(cause: Cause | None, words: str) -> None:
    text = render(outcome(Ending.KILLED, state=State.LOST, cause=cause))
    assert words in text
    assert "Variables and imports are lost; files in /mnt/data are kept." in text


@pytest.mark.parametrize("ending", list(Ending))
@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", [None, *CauseKind])
def test_no_outcome_has_an_empty_text(ending: Ending, state: State, kind: CauseKind | None) -> None:
    cause = Cause(kind) if kind is not None else None
    assert render(outcome(ending, state=state, cause=cause)).strip()
    assert render(outcome(ending, state=state, cause=cause, exit_code=0)).strip()
    assert render(outcome(ending, state=state, cause=cause, value="", error="", output=Output("\n"))).strip()


def test_notes_images_and_files_are_named() -> None:
    text = render(
        outcome(
            value="1",
            notes=("No network here.",),
            images=(ImageRef("/mnt/data/f.png", "image/png"),),
            files=(FileRef("/mnt/data/f.png", 3), FileRef("/mnt/data/t.csv", 5)),
        )
    )
    assert "[No network here.]" in text
    assert text.count("f.png") == 1
    assert "[File written: /mnt/data/t.csv (5 bytes)]" in text
    many = tuple(FileRef(f"/mnt/data/{n}", 1) for n in range(30))
    assert "and 10 more files" in render(outcome(files=many))


def test_a_receipt_is_plain_json_values() -> None:
    meta = receipt_meta(outcome(Ending.TIMED_OUT, cause=Cause(CauseKind.DEADLINE, rung=Rung.KILL)).receipt)
    assert meta["ending"] == "timed_out"
    assert meta["cause"]["rung"] == "kill"
