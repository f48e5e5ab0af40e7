"""Text from elsewhere on a terminal."""

from __future__ import annotations

import sys

import pytest

from toolhost.cli.printable import echo, printable

HOSTILE = "safe \u202egnp.exe\u2066\x1b]0;title\x07\u00a0\u3000é\ttab\n"


def test_what_drives_a_terminal_or_turns_text_around_goes_and_the_rest_stays() -> None:
    assert printable(HOSTILE) == "safe gnp.exe]0;title\u00a0\u3000é\ttab\n"


def test_a_terminal_is_told_of_what_is_left_out_and_a_program_gets_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo(HOSTILE)
    assert capsys.readouterr() == (HOSTILE + "\n", "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    echo(HOSTILE)
    said = capsys.readouterr()
    assert said.out == printable(HOSTILE) + "\n"
    assert said.err == "toolhost: 4 characters that would command the terminal are not shown\n"
    echo("plain")
    assert capsys.readouterr() == ("plain\n", "")
