"""`toolhost serve --gateway`: one process that answers /v1/responses with real sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.host import RunningHost
from tests.toolhost.loop.checks import check_response
from toolhost.loop import fake_model

PYTHON: dict[str, Any] = {"type": "code_interpreter", "container": {"type": "auto"}}


def code(text: str) -> dict[str, Any]:
    return {"calls": [{"name": "python", "arguments": {"code": text}}]}


@pytest.mark.bubblewrap
async def test_two_turns_share_a_real_sandbox_and_a_branch_gets_a_fresh_one(tmp_path: Path) -> None:
    import asyncio

    rounds = [code("x = 41"), {"text": "set"}, code("print(x + 1)"), {"text": "42"}, code("print('x' in globals())")]
    async with fake_model.serving([*rounds, {"text": "fresh"}]) as (model, url):
        host = RunningHost(tmp_path / "state", arguments=["--gateway", "--model-url", url])
        await asyncio.to_thread(host.start)
        try:
            async with openai.AsyncOpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0) as client:
                options: Any = {"model": "fake", "tools": [PYTHON], "include": ["code_interpreter_call.outputs"]}
                first = await client.responses.create(input="Set x", **options)
                second = await client.responses.create(input="Read x", previous_response_id=first.id, **options)
                check_response(second)
                assert second.output[0].outputs[0].logs.strip() == "42"  # type: ignore[union-attr,index]
                branch = await client.responses.create(input="Read x", previous_response_id=first.id, **options)
                assert branch.output[0].outputs[0].logs.strip() == "False"  # type: ignore[union-attr,index]
                told = [one["content"] for one in model.requests[-1]["messages"] if one["role"] == "system"]
                assert "fresh session" in told[0]
        finally:
            await asyncio.to_thread(host.purge)
