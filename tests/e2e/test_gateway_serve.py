"""`toolhost serve --gateway`: one process that answers /v1/responses with real sandboxes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.host import RunningHost
from tests.toolhost.gateway.processes import GatewayProcess
from tests.toolhost.loop.checks import check_response
from toolhost.loop import fake_model

PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}


def code(text: str) -> dict[str, Any]:
    return {"calls": [{"name": "python", "arguments": {"code": text}}]}


WRITE = "x = 41; open('/mnt/data/a.txt', 'w').write('from code')"


@pytest.mark.bubblewrap
@pytest.mark.parametrize("apart", [False, True], ids=["one-process", "two-processes"])
async def test_turns_share_a_real_sandbox_its_files_come_out_and_a_branch_is_fresh(tmp_path: Path, apart: bool) -> None:
    rounds = [code(WRITE), {"text": "set"}, code("print(x + 1)"), {"text": "42"}, code("print('x' in globals())")]
    async with AsyncExitStack() as stack:
        model, url = await stack.enter_async_context(fake_model.serving([*rounds, {"text": "fresh"}]))
        host = RunningHost(tmp_path / "host", arguments=[] if apart else ["--gateway", "--model-url", url])
        stack.callback(host.purge)
        await asyncio.to_thread(host.start)
        address = host.url
        if apart:
            tools = f"{host.address}/python"
            gateway = GatewayProcess(tmp_path, "gateway", "--model-url", url, "--tools", tools)
            stack.callback(gateway.stop)
            await asyncio.to_thread(gateway.start)
            address = gateway.url
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x"))
        await check(client, model)


async def check(client: openai.AsyncOpenAI, model: fake_model.FakeModel) -> None:
    options: Any = {"model": "fake", "tools": [PYTHON], "include": ["code_interpreter_call.outputs"]}
    first: Any = await client.responses.create(input="Set x", **options)
    second: Any = await client.responses.create(input="Read x", previous_response_id=first.id, **options)
    check_response(second)
    assert second.output[0].outputs[0].logs.strip() == "42"
    container = first.output[0].container_id
    files = await client.containers.files.list(container)
    assert [file.path.rpartition("/")[2] for file in files.data] == ["a.txt"]
    content = await client.containers.files.content.retrieve(files.data[0].id, container_id=container)
    assert content.content == b"from code"
    for ident in ("cfile_Li4vLi4vZXRj", "cfile_L2V0Yy9wYXNzd2Q", "file_x"):  # ../../etc, /etc/passwd
        with pytest.raises(openai.APIStatusError):
            await client.containers.files.content.retrieve(ident, container_id=container)
    with pytest.raises(openai.NotFoundError):
        await client.containers.files.list("cntr_unknown")
    branch: Any = await client.responses.create(input="Read x", previous_response_id=first.id, **options)
    assert branch.output[0].outputs[0].logs.strip() == "False"
    told = [one["content"] for one in model.requests[-1]["messages"] if one["role"] == "system"]
    assert "fresh session" in told[0]
