"""Hosted tools through the gateway, with a real host: searches with citations, plots that the model sees, files."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.host import RunningHost
from tests.toolhost.gateway.processes import GatewayProcess
from tests.toolhost.loop.checks import check_response, check_stream
from tests.toolhost.search.test_provider_contract import searxng
from toolhost.loop import fake_model

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(240)]

PAGE = "<html><head><title>Zebras</title></head><body><p>Zebras have stripes.</p><p>All of them.</p></body></html>"
PLOT = """
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.savefig('/mnt/data/plot.png')
plt.show()
"""
PYTHON: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
OUTPUTS: Any = ["code_interpreter_call.outputs"]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


@asynccontextmanager
async def served(
    directory: Path, rounds: list[dict[str, Any]], apart: bool, **environment: str
) -> AsyncIterator[tuple[openai.AsyncOpenAI, fake_model.FakeModel]]:
    """A host with a gateway in its process, or in one of its own."""
    async with AsyncExitStack() as stack:
        model, url = await stack.enter_async_context(fake_model.serving(rounds))
        arguments = [] if apart else ["--gateway", "--model-url", url]
        host = RunningHost(directory / "host", arguments=arguments, environment=environment)
        stack.callback(host.purge)
        await asyncio.to_thread(host.start)
        address = host.url
        if apart:
            tools = f"{host.address}/python,{host.address}/browser"
            gateway = GatewayProcess(directory, "gateway", "--model-url", url, "--tools", tools, **environment)
            stack.callback(gateway.stop)
            await asyncio.to_thread(gateway.start)
            address = gateway.url
        yield await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x")), model


@asynccontextmanager
async def website() -> AsyncIterator[TestServer]:
    """A page, and a SearXNG that finds it."""

    async def search(request: web.Request) -> web.Response:
        record = {"title": "Zebras", "url": str(server.make_url("/zebras")), "text": "Striped animals"}
        return web.Response(body=searxng([record]), content_type="application/json")

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/search", search), web.get("/zebras", page)])
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    try:
        yield server
    finally:
        await server.close()


@pytest.mark.parametrize("apart", [False, True], ids=["one-process", "two-processes"])
async def test_a_search_is_shown_as_one_and_its_citations_are_url_citations(tmp_path: Path, apart: bool) -> None:
    answer = {"text": "They have stripes【1†L0-L4】, nothing else 【9†L1】.", "chunk": 5}
    rounds = [call("browser_search", query="zebra"), call("browser_open", id=0), answer]
    async with website() as site:
        environment = {
            "TOOLHOST_SEARCH__PROVIDER": "searxng",
            "TOOLHOST_SEARCH__SEARXNG_URL": str(site.make_url("/")),
            "TOOLHOST_BROWSER__ALLOW_NETWORKS": '["127.0.0.0/8"]',
            "TOOLHOST_BROWSER__PORTS": json.dumps([site.port]),
        }
        async with served(tmp_path, rounds * 2, apart, **environment) as (client, model):
            for kind in ("web_search", "web_search_preview"):
                events = [
                    event
                    async for event in await client.responses.create(
                        model="fake", input="Zebras?", tools=[{"type": kind}], stream=True
                    )
                ]
                final: Any = check_stream(events)
                searched, opened, message = final.output
                assert (searched.type, searched.status, searched.action.type) == (
                    *("web_search_call", "completed"),
                    "search",
                )
                assert searched.action.query == "zebra"
                assert (opened.type, opened.status, opened.action.type) == ("web_search_call", "completed", "open_page")
                [text] = message.content
                assert text.text == answer["text"]
                [citation] = text.annotations
                assert text.text[citation.start_index : citation.end_index] == "【1†L0-L4】"
                assert (citation.type, citation.url, citation.title) == (
                    *("url_citation", str(site.make_url("/zebras"))),
                    "Zebras",
                )
                added = [event for event in events if event.type == "response.output_text.annotation.added"]
                assert [event.annotation_index for event in added] == [0]
                assert check_response(final) is None
                assert (await client.responses.retrieve(final.id)).model_dump() == final.model_dump()
                said = json.dumps(model.requests[-1]["messages"])
                assert "Striped animals" in said and "Zebras have stripes" in said


@pytest.mark.science
@pytest.mark.parametrize("apart", [False, True], ids=["one-process", "two-processes"])
async def test_a_plot_reaches_the_model_as_an_image_and_the_client_as_output_and_file(
    tmp_path: Path, apart: bool
) -> None:
    rounds = [call("python", code=PLOT), {"text": "A line."}]
    async with served(tmp_path, rounds * 3, apart, TOOLHOST_GATEWAY__IMAGES="true") as (client, model):
        options: Any = {"model": "fake", "input": "Plot", "tools": [PYTHON], "include": OUTPUTS}
        plain: Any = await client.responses.create(**options)
        streamed: Any = check_stream([one async for one in await client.responses.create(stream=True, **options)])
        for response in (plain, streamed):
            check_response(response)
            images = [one.url for one in response.output[0].outputs if one.type == "image"]
            assert len(images) == 1
            assert base64.b64decode(images[0].partition("base64,")[2]).startswith(b"\x89PNG")
        for request in (model.requests[1], model.requests[3]):
            shown = [
                part["image_url"]["url"]
                for message in request["messages"]
                if isinstance(message["content"], list)
                for part in message["content"]
                if part["type"] == "image_url"
            ]
            assert len(shown) == 1 and shown[0].startswith("data:image/png;base64,")

        container = plain.output[0].container_id
        [file] = (await client.containers.files.list(container)).data
        content = await client.containers.files.content.retrieve(file.id, container_id=container)
        assert content.content.startswith(b"\x89PNG")
        assert (await client.containers.files.retrieve(file.id, container_id=container)).path.endswith("plot.png")

        named: Any = {"type": "code_interpreter", "container": container}
        again: Any = await client.responses.create(**{**options, "tools": [named]})
        assert again.output[0].container_id == container
        without: Any = {**options, "include": []}
        model.rounds.insert(0, fake_model.ScriptedRound.model_validate(rounds[0]))
        model.rounds.append(fake_model.ScriptedRound.model_validate(rounds[1]))
        assert (await client.responses.create(**without)).output[0].outputs is None
