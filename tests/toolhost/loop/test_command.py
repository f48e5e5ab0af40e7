"""`toolhost run` and `toolhost trace` as processes, against the fake model and the tools on loopback."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.toolhost.loop.checks import ADAPTER, check_stream
from tests.toolhost.loop.mcp_double import Double
from tests.toolhost.loop.test_scenarios import python, search
from toolhost import cli
from toolhost.loop import fake_model

pytestmark = pytest.mark.timeout(400)  # some tests start three processes, each of seconds of imports

ROUNDS: list[dict[str, Any]] = [
    {"reasoning": "Multiply.", "calls": [python("print(6 * 7)"), search("forty two")]},
    {"text": "The answer is 42."},
]
APP = """
import typer
from toolhost.cli.run import run
from toolhost.cli.trace import trace
app = typer.Typer()
app.command()(run)
app.command()(trace)
app()
"""


async def in_a_terminal(answers: bytes, *arguments: str, columns: int = 200) -> tuple[int, str]:
    """Run in a pseudo-terminal, giving one answer to each question; exit code and what was shown, without colours."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", APP, *arguments, stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown, asked = b"", 0
    while chunk := await asyncio.to_thread(read, master):
        shown += chunk
        # A question may come in pieces, or with more behind it: what counts is how many there were so far.
        while answers and re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).count(b"[y/N]:") > asked:
            asked += 1
            os.write(master, answers[:1] + b"\n")
            answers = answers[1:]
    os.close(master)
    return await process.wait(), re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


async def start(*arguments: str, before: str = "") -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    null = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", before + APP, *arguments, stdin=null, stdout=pipe, stderr=pipe
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await process.communicate()
    return process.returncode, (out or b"").decode(), err.decode()


async def test_in_a_pipe_the_answer_is_on_stdout_and_the_way_to_it_on_stderr(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        tools = f"{double.at('python')},{double.at('browser')}"
        options = ["--model", url, "--tools", tools, "--trace-dir", str(tmp_path)]
        code, out, err = await finish(await start("run", "What is 6 times 7?", *options))
    assert (code, out) == (0, "The answer is 42.\n")
    first, *calls = err.splitlines()[:4]
    assert first == "reasoning: Multiply."
    code_lines, search_line = ["python: print(6 * 7)", "  42"], "browser search: forty two"
    assert calls in ([*code_lines, search_line], [search_line, *code_lines]), "in the order in which they ended"
    response = err.split()[-1]
    code, out, _ = await finish(await start("trace", response, "--json", "--trace-dir", str(tmp_path)))
    assert code == 0
    assert [call["terminal"] for call in json.loads(out)["calls"]] == ["result", "result"]
    code, out, _ = await finish(await start("trace", response, "--trace-dir", str(tmp_path)))
    assert code == 0
    assert "result: accepted" in out


async def test_in_a_pipe_each_message_begins_a_line(double: Double, tmp_path: Path) -> None:
    rounds = [{"text": "Let me see.", "calls": [python("1")]}, {"text": "It is one", "finish": "length"}]
    async with fake_model.serving(rounds) as (_, url):
        options = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", APP, "run", "Go", *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        shown, _ = await process.communicate()
    lines = shown.decode().splitlines()
    assert process.returncode == 1
    assert [line for line in lines if line.startswith(("Let", "It", "incomplete"))] == [
        "Let me see.",
        "It is one",
        "incomplete: max_output_tokens",
    ]


async def test_json_is_a_valid_event_stream(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        tools = f"{double.at('python')},{double.at('browser')}"
        options = ["--json", "--model", url, "--tools", tools, "--trace-dir", str(tmp_path)]
        code, out, _ = await finish(await start("run", "What is 6 times 7?", *options))
    assert code == 0
    response = check_stream([ADAPTER.validate_json(line) for line in out.splitlines()])
    assert response is not None
    assert response.output_text == "The answer is 42."
    assert response.model == "fake"


async def test_ctrl_c_cancels_model_and_tool(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving([{"calls": [python("hold()")]}]) as (_, url):
        options = ["--json", "--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        process = await start("run", "Wait", *options)
        await double.host.started.wait()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            await double.host.was_cancelled.wait()
            code, out, err = await finish(process)
    assert code == 130
    assert "trace: toolhost trace resp_" in err
    check_stream([ADAPTER.validate_json(line) for line in out.splitlines()], cancelled=True)
    assert [namespace for _, namespace in double.host.cleaned] == ["python"]


async def test_a_second_ctrl_c_ends_a_run_that_does_not_come_to_its_end(double: Double, tmp_path: Path) -> None:
    deaf = "from toolhost.loop.run import LoopRun\nLoopRun.cancel = lambda self: print('asked', flush=True)\n"
    async with fake_model.serving([{"calls": [python("hold()")]}]) as (_, url):
        options = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        process = await start("run", "Wait", *options, before=deaf)
        await double.host.started.wait()
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"asked\n"
            while process.returncode is None:  # one that comes too soon counts as the same
                process.send_signal(signal.SIGINT)
                await asyncio.wait((asyncio.ensure_future(process.wait()),), timeout=0.2)
        _, _, err = await finish(process)
    assert process.returncode == 130
    assert err.endswith("toolhost: ended at once\n")


async def test_ctrl_c_before_there_is_a_run_is_said_too(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never_answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(never_answering, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for options in (
            ["--model", f"http://{address}/v1"],
            ["--model", f"http://{address}/v1", "--tools", f"{address}/x"],
        ):
            asked.clear()
            process = await start("run", "Hello", *options, "--trace-dir", str(tmp_path))
            await asked.wait()
            process.send_signal(signal.SIGINT)
            assert await finish(process) == (130, "", "toolhost run: cancelled\n")


def test_ctrl_c_while_a_command_loads_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["toolhost", "run", "Hello"])
    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "toolhost: interrupted\n"


async def test_an_end_of_input_at_the_question_for_consent_is_a_cancel(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        options = ["--approve", "--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, shown = await in_a_terminal(b"\x04", "run", "What is 6 times 7?", *options)
    assert code == 130
    assert shown.endswith("toolhost run: cancelled\n")
    assert not double.host.runs


@pytest.mark.parametrize("view", [["--json"], []], ids=["json", "plain"])
async def test_a_reader_that_has_seen_enough_cancels_the_run_without_a_complaint(
    double: Double, tmp_path: Path, view: list[str]
) -> None:
    """As in `toolhost run … | head -1`."""
    text = {"text": "word " * 400, "pause": "gate", "pause_at": 1, "chunk": 5, "delay": 0.02}
    async with fake_model.serving([{"calls": [python("1")]}, text]) as (model, url):
        options = [*view, "--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        reading, writing = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", APP, "run", "Go", *options), stdout=writing, stderr=asyncio.subprocess.PIPE
        )
        os.close(writing)
        await model.reached("gate")
        assert await asyncio.to_thread(os.read, reading, 1)
        os.close(reading)
        model.release("gate")
        code, _, err = await finish(process)
    *_, trace = err.splitlines()
    assert code == 130
    assert re.fullmatch(r"trace: toolhost trace resp_[0-9a-f]{32}", trace)
    assert not re.search("Traceback|Exception|Broken pipe", err)
    assert [namespace for _, namespace in double.host.cleaned] == ["python"]
    code, out, _ = await finish(await start("trace", trace.split()[-1], "--json", "--trace-dir", str(tmp_path)))
    assert json.loads(out)["ending"] == "cancelled"


async def test_an_output_that_cannot_be_written_is_one_line_and_keeps_the_trace(tmp_path: Path) -> None:
    async with fake_model.serving([{"text": "fine"}]) as (_, url):
        with open("/dev/full", "w") as full:  # noqa: ASYNC230 - a device
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", APP, "run", "Go", "--model", url, "--trace-dir", str(tmp_path)),
                stdout=full,
                stderr=asyncio.subprocess.PIPE,
            )
            code, _, err = await finish(process)
    assert (code, err) == (1, "toolhost run: the output cannot be written: No space left on device\n")
    assert len(os.listdir(tmp_path)) == 1


def test_what_run_loads_is_not_the_host() -> None:
    """It is a client: nobody should wait for the server's modules, or without tools for the MCP client's."""
    names = "uvicorn, starlette, sandboxes.manager, toolhost.app, mcp"
    code = f"import sys, toolhost.cli.run_loop; print([n for n in '{names}'.split(', ') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_approve_runs_nothing_without_a_terminal_to_ask_at(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        options = ["--approve", "--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, _, err = await finish(await start("run", "What is 6 times 7?", *options))
    assert code == 3
    assert "needs approval: python.python" in err
    assert not double.host.runs


async def test_a_terminal_shows_reasoning_code_output_and_answer(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        tools = f"{double.at('python')},{double.at('browser')}"
        options = ["--model", url, "--tools", tools, "--trace-dir", str(tmp_path)]
        code, shown = await in_a_terminal(b"", "run", "What is 6 times 7?", *options)
    assert code == 0
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[:3] == ["Multiply.", "python", "print(6 * 7)"]
    assert sorted(lines[3:5]) == ["  42", "browser search: forty two"], "in the order in which they ended"
    assert lines[5] == "The answer is 42."


async def test_approve_asks_at_the_terminal_and_runs_only_what_was_allowed(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        tools = f"{double.at('python')},{double.at('browser')}"
        options = ["--approve", "--model", url, "--tools", tools, "--trace-dir", str(tmp_path)]
        code, shown = await in_a_terminal(b"ny", "run", "What is 6 times 7?", *options)
    assert code == 0
    assert double.host.runs == [("browser", "search", {"query": "forty two"})]
    assert "The answer is 42." in shown


async def test_text_from_outside_cannot_drive_the_terminal(double: Double, tmp_path: Path) -> None:
    rounds = [{"calls": [python("print('\\x1b]0;owned\\x07\\x1b[2J')")]}, {"text": "\x1b[2Jclean\x9b"}]
    async with fake_model.serving(rounds) as (_, url):
        options = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, out, err = await finish(await start("run", "Hello", *options))
    assert code == 0
    assert out == "[2Jclean\n"
    assert "\x1b" not in err


async def test_a_deadline_and_a_model_that_is_not_there_are_said_plainly(tmp_path: Path) -> None:
    rounds = [{"text": "x", "pause": "gate"}]
    async with fake_model.serving(rounds) as (_, url):
        options = ["--model", url, "--deadline", "0.5", "--trace-dir", str(tmp_path)]
        code, _, err = await finish(await start("run", "Hello", *options))
    assert code == 1
    assert "deadline of 0.5 s" in err
    code, _, err = await finish(await start("run", "Hello", "--model", "http://127.0.0.1:9/v1"))
    assert code == 1
    assert err.startswith("toolhost run: the model server at http://127.0.0.1:9/v1 does not say")


@pytest.mark.parametrize(
    ("rounds", "options", "why"),
    [
        (
            [{"calls": [python("1")]}, {"calls": [python("2")]}, {"calls": [python("3")]}],
            ["--max-rounds", "2"],
            "the limit of 2 rounds (--max-rounds)",
        ),
        ([{"text": "It is", "finish": "none"}], [], "the model server's answer broke off"),
        ([{"text": "It is", "finish": "length"}], [], "max_output_tokens"),
    ],
    ids=["rounds", "cut off", "tokens"],
)
async def test_an_incomplete_run_says_why(
    double: Double, tmp_path: Path, rounds: list[dict[str, Any]], options: list[str], why: str
) -> None:
    async with fake_model.serving(rounds) as (_, url):
        always = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, _, err = await finish(await start("run", "Hello", *always, *options))
    assert code == 1
    assert f"incomplete: {why}" in err.splitlines()


async def test_a_model_that_sends_half_of_a_surrogate_pair_ends_as_any_other(double: Double, tmp_path: Path) -> None:
    rounds = [{"calls": [{"name": "python", "arguments": '{"code": "print(1) # \\ud800"}'}]}, {"text": "a\ud800b"}]
    async with fake_model.serving(rounds) as (_, url):
        options = ["--json", "--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, out, err = await finish(await start("run", "Hello", *options))
    assert code == 0, err
    response = check_stream([ADAPTER.validate_json(line) for line in out.splitlines()])
    assert response is not None
    assert response.output_text == "a\ufffdb"
    code, _, err = await finish(await start("trace", response.id, "--json", "--trace-dir", str(tmp_path)))
    assert (code, err) == (0, "")


async def test_a_failed_piece_of_code_shows_what_it_failed_of(double: Double, tmp_path: Path) -> None:
    rounds = [{"calls": [python("print('Error: no sandbox is free')")]}, {"text": "It cannot be."}]
    async with fake_model.serving(rounds) as (_, url):
        options = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, _, err = await finish(await start("run", "Hello", *options))
    assert code == 0
    assert err.splitlines()[1:3] == ["  Error: no sandbox is free", "  (failed)"]


async def test_a_trace_that_cannot_be_saved_is_a_warning(tmp_path: Path) -> None:
    async with fake_model.serving([{"text": "fine"}]) as (_, url):
        code, out, err = await finish(await start("run", "Hello", "--model", url, "--trace-dir", "/proc"))
    assert (code, out) == (0, "fine\n")
    assert err.startswith("toolhost run: warning: the trace is not saved: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--model", "http://[::1"], "http://HOST:PORT/v1"),
        (["--model", "http://127.0.0.1:99999/v1"], "http://HOST:PORT/v1"),
        (["--model", "http://"], "http://HOST:PORT/v1"),
        (["--model", "127.0.0.1:8001/v1"], "http://HOST:PORT/v1"),
        (["--model", "localhost:8001/v1"], "http://HOST:PORT/v1"),
        (["--model", "ftp://127.0.0.1/v1"], "http://HOST:PORT/v1"),
        (["--session", "ä"], "--session"),
        (["--api-key-file", "/proc"], "cannot read the key in /proc"),
        (["--api-key-file", "/no/such/key"], "cannot read the key"),
        (["--api-key-file", sys.executable], "must hold a key"),
        (["--trace-dir", "/proc/x"], "/proc/x"),
        (["--instructions", "\udcff"], "UTF-8"),
    ],
)
async def test_what_cannot_be_started_is_one_line_and_exit_code_two(
    tmp_path: Path, options: list[str], word: str
) -> None:
    always = ["--model", "http://127.0.0.1:9/v1", "--trace-dir", str(tmp_path)]
    code, out, err = await finish(await start("run", "Hello", *always, *options))
    assert (code, out) == (2, "")
    assert word in err
    assert len(err.splitlines()) == 1, err


async def test_the_readmes_output_is_what_the_commands_print(double: Double, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    _, _, rest = (root / "README.md").read_text().partition("$ toolhost run ")
    shown = rest.partition("```")[0].splitlines()[1:]
    rounds = json.loads((root / "docs" / "examples" / "factorial.json").read_text())
    async with fake_model.serving(rounds) as (_, url):
        options = ["--model", url, "--tools", double.at("python"), "--trace-dir", str(tmp_path)]
        code, out, err = await finish(await start("run", "What is 20 factorial?", *options))
    assert code == 0
    *way, trace = err.splitlines()
    assert [*way, *out.splitlines()] == shown[:-1]
    assert re.fullmatch(r"trace: toolhost trace resp_[0-9a-f]{32}", trace)
    assert re.fullmatch(r"trace: toolhost trace resp_[0-9a-f]{32}", shown[-1])


async def test_a_wrong_address_is_one_line_that_says_what_to_look_at(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving([]) as (_, url):
        for options, said in (
            (["--model", url, "--tools", double.at("nowhere")], "it answered 404; is there a tool server at"),
            (["--model", url.removesuffix("/v1")], "it answered 404 to /models; an address mostly ends in /v1"),
            (["--model", url, "--tools", "my host/python"], "is not HOST:PORT/namespace"),
        ):
            code, _, err = await finish(await start("run", "Hello", *options, "--trace-dir", str(tmp_path)))
            assert code in (1, 2)
            assert said in err
            assert len(err.splitlines()) == 1, err


async def test_a_narrow_terminal_shows_the_trace_line_by_line(double: Double, tmp_path: Path) -> None:
    async with fake_model.serving(ROUNDS) as (_, url):
        options = ["--model", url, "--tools", f"{double.at('python')},{double.at('browser')}"]
        _, _, err = await finish(await start("run", "What is 6 times 7?", *options, "--trace-dir", str(tmp_path)))
    code, shown = await in_a_terminal(b"", "trace", err.split()[-1], "--trace-dir", str(tmp_path), columns=40)
    assert code == 0
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) < 25
    assert "accepted" in shown


async def test_trace_of_an_unknown_or_impossible_id_is_a_plain_error(tmp_path: Path) -> None:
    for response in ("resp_0", "../../etc/passwd"):
        code, _, err = await finish(await start("trace", response, "--trace-dir", str(tmp_path)))
        assert code == 1
        assert err.startswith("toolhost trace: ")


async def test_the_fake_model_is_a_command(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(ROUNDS))
    with_port = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = with_port.sockets[0].getsockname()[1]
    with_port.close()
    await with_port.wait_closed()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "toolhost.loop.fake_model", str(script), "--port", str(port)
    )
    try:
        async with asyncio.timeout(30), httpx2.AsyncClient() as http:
            while True:
                try:
                    models = await http.get(f"http://127.0.0.1:{port}/v1/models")
                    break
                except httpx2.ConnectError:
                    await asyncio.sleep(0.05)
        assert models.json()["data"][0]["id"] == "fake"
    finally:
        process.terminate()
        await process.wait()
