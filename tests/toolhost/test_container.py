"""The container namespace: the forms of arguments that models send, and what its results say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.spec import Cause, CauseKind, Ending, Output, Rung, ShellCall, State
from tests.toolhost.conftest import Host
from tests.toolhost.test_render import outcome
from toolhost.errors import BadArguments
from toolhost.namespaces.container import EXEC, command_of, environment_of, shell_call
from toolhost.namespaces.render import NOTHING_FROM_COMMAND, render


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (["ls", "-l"], ("ls", "-l")),
        ("ls -l | wc", "ls -l | wc"),
        ('["ls", "-l"]', ("ls", "-l")),
        (' ["bash", "-lc", "echo \\"a b\\""] ', ("bash", "-lc", 'echo "a b"')),
        ("[ -f x ] && echo there", "[ -f x ] && echo there"),  # a test, not JSON
        ("[1, 2]", "[1, 2]"),  # JSON, but no command
        ("[]", "[]"),
        ("[" * 100_000, "[" * 100_000),
        (["sleep", 5], ("sleep", "5")),
    ],
)
def test_a_command_is_taken_in_every_form_that_models_send(sent: object, meant: object) -> None:
    assert command_of(sent) == meant


@pytest.mark.parametrize(
    "sent", [None, "", "  ", [], 7, {"cmd": ["ls"]}, [["ls"]], [None], "a\0b", ["a\0b"], [""], [" ", "x"], True]
)
def test_another_command_is_refused_with_what_to_send(sent: object) -> None:
    with pytest.raises(BadArguments, match="Nothing ran") as refused:
        command_of(sent)
    assert "exec" in refused.value.message


def test_a_program_without_a_name_is_named_as_what_is_wrong() -> None:
    with pytest.raises(BadArguments, match='first part of "cmd" of exec is the program, and it is empty'):
        command_of([""])
    assert command_of(["printf", ""]) == ("printf", "")


@given(st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_no_command_does_more_than_be_refused(sent: object) -> None:
    try:
        found = command_of(sent)
    except BadArguments:
        return
    assert found and isinstance(found, str | tuple)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["bash", "-lc", "cd /tmp && x=1"], "cd /tmp && x=1"),
        (["/bin/sh", "-c", "x=1"], "x=1"),
        (["cd", "/mnt/data/a b"], "cd '/mnt/data/a b'"),
        (["bash", "script.sh"], "bash script.sh"),
        (["echo", "$HOME; id"], "echo '$HOME; id'"),
    ],
)
def test_words_for_a_named_shell_keep_their_meaning_there(words: list[str], text: str) -> None:
    assert shell_call({"cmd": words, "session_name": "a"}) == ShellCall(text, shell="a")


def test_the_other_arguments_are_passed_on_and_empty_ones_are_none() -> None:
    full = {"cmd": ["a"], "workdir": "x", "env": {"A": "1", "N": 2}, "session_name": "", "user": None, "timeout": 3}
    assert shell_call(full) == ShellCall(("a",), workdir="x", env={"A": "1", "N": "2"})
    assert environment_of('{"A": "b"}') == {"A": "b"}
    assert environment_of(None) == environment_of("") == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"command": "ls"}, "'command'"),
        ({"cmd": "ls", "env": ["A=1"]}, '"env"'),
        ({"cmd": "ls", "env": "A=1"}, '"env"'),
        ({"cmd": "ls", "env": {"A=": "1"}}, "'A='"),
        ({"cmd": "ls", "env": {"A": None}}, "'A'"),
        ({"cmd": "ls", "workdir": 1}, '"workdir"'),
        ({"cmd": "ls", "session_name": ["a"]}, '"session_name"'),
        ({"cmd": "ls", "user": 0}, '"user"'),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArguments) as refused:
        shell_call(arguments)
    assert says in refused.value.message


@pytest.mark.parametrize(("sent", "seconds"), [(7, 7.0), ("7", 7.0), (1e9, 600.0), (None, 120.0), ("", 120.0)])
async def test_a_timeout_is_bounded_by_the_operator(host: Host, sent: object, seconds: float) -> None:
    host.manager.outcome = outcome(exit_code=0)
    async with await host.connect("/container/sse") as client:
        await client.tool("exec", {"cmd": ["true"], "timeout": sent})
    assert host.manager.executions[0].timeout_s == seconds


@pytest.mark.parametrize("sent", [0, -1, "soon", True, [1]])
async def test_a_wrong_timeout_runs_nothing(host: Host, sent: object) -> None:
    async with await host.connect("/container/sse") as client:
        result = await client.tool("exec", {"cmd": ["true"], "timeout": sent})
    assert result["isError"] and "timeout" in result["content"][0]["text"]
    assert host.manager.executions == []


async def test_missing_and_mistaken_commands_come_back_as_texts(host: Host) -> None:
    async with await host.connect("/container/sse") as client:
        for arguments in ({}, {"cmd": None}, {"cmd": {}}, {"input": "x"}):
            result = await client.tool("exec", arguments)
            assert result["isError"]
            assert len(result["content"]) == 1 and "exec" in result["content"][0]["text"]


async def test_the_listing_is_what_inference_servers_can_rewrite(host: Host) -> None:
    async with await host.connect("/container/sse") as client:
        tools = (await client.call("tools/list"))["result"]["tools"]
        assert [tool["name"] for tool in tools] == ["exec", "cleanup_session"]
        shown, hidden = tools
        assert "include_in_prompt" not in shown["annotations"]
        assert hidden["annotations"]["include_in_prompt"] is False
        assert hidden["_meta"]["include_in_prompt"] is False
        assert shown["title"] == shown["annotations"]["title"] == "Run a command"
        assert shown["annotations"]["readOnlyHint"] is False
        await client.tool("cleanup_session")
        await client.tool("cleanup_session")


async def test_an_attempt_id_goes_with_the_command(host: Host) -> None:
    host.manager.outcome = outcome(exit_code=0)
    async with await host.connect("/container/sse") as client:
        listed = (await client.call("tools/list"))["result"]["tools"]
        assert listed[0]["_meta"]["toolhost/attempts"] is True
        await client.tool("exec", {"cmd": ["true"]}, meta={"toolhost/attempt-id": "one"})
        refused = await client.tool("exec", {"cmd": ["true"]}, meta={"toolhost/attempt-id": "a/b"})
    assert refused["isError"]
    assert [execution.attempt_id for execution in host.manager.executions] == ["one"]


def test_every_argument_has_one_plain_type() -> None:
    for schema in EXEC.input_schema["properties"].values():
        assert isinstance(schema["type"], str) and "properties" not in schema


# --- what results say ------------------------------------------------------------------------------------------------


def test_a_result_is_output_and_exit_code() -> None:
    assert render(outcome(output=Output("a\nb\n"), exit_code=0)) == "a\nb\n[Exit code 0.]"
    assert render(outcome(output=Output("bad"), exit_code=3, ending=Ending.RAISED)) == "bad\n[Exit code 3.]"


def test_a_silent_command_says_so() -> None:
    assert render(outcome(exit_code=0)) == f"{NOTHING_FROM_COMMAND}\n[Exit code 0.]"
    assert "Exit code 1." in render(outcome(exit_code=1, ending=Ending.RAISED))


def test_a_killed_command_is_not_called_an_interpreter() -> None:
    killed = outcome(exit_code=137, ending=Ending.KILLED, cause=Cause(CauseKind.SIGNAL, signal=9))
    assert render(killed) == (
        "[The command died: killed by signal 9 (SIGKILL). Exit code 137. Variables and files are kept.]"
    )
    cause = Cause(CauseKind.DEADLINE, rung=Rung.KILL, limit=2.0)
    late = render(outcome(exit_code=137, ending=Ending.TIMED_OUT, cause=cause, state=State.KEPT))
    assert "Timed out after 2 s: it ignored two interrupts, so it was killed. Exit code 137." in late
    assert "interpreter" not in late
