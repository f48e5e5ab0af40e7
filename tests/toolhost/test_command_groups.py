"""What groups of commands have in common, and tokens: in this process, since a command starts slowly."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from toolhost.cli import COMMANDS, tokens

GROUPS = [name for name, (place, _) in COMMANDS.items() if place.endswith(":app")]


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_helps_in_one_style(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    app: typer.Typer = getattr(importlib.import_module(module), attribute)
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "--help" in shown
    assert "--install-completion" not in shown
    assert not re.search("[╭│]", shown)


def new(file: Path, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(tokens.app, ["new", "--file", str(file), *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_second_token_of_a_name_is_made_only_when_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# alice: none yet\n")
    assert new(file, "alice")[0] == 0
    before = file.read_text()
    code, out, err = new(file, "alice")
    assert (code, out) == (2, "")
    assert "--also" in err
    assert file.read_text() == before
    assert new(file, "alic")[0] == 0
    assert new(file, "alice", "--also")[0] == 0
    assert file.read_text().count("\nalice:") == 2


def test_a_file_that_is_not_text_is_no_tokens_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"\xff\xfe")
    code, _, err = new(file, "alice")
    assert code == 2
    assert "not a tokens file" in err
