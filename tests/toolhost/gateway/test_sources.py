"""A tool host over HTTP that is none: whatever it answers, the client hears whose fault it is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from toolhost.gateway.errors import ApiError
from toolhost.gateway.sources import HostCitations, HostFiles

ANSWERS = {
    "a page": "<html>",
    "a list": "[]",
    "none": "null",
    "nothing in it": "{}",
    "wrong entries": '{"files": [{"kind": "file"}], "citations": [5]}',
    "wrong values": '{"files": [{"kind": "file", "path": "/a", "size": "big", "modified": null}], "citations": 5}',
}


@pytest.fixture(params=ANSWERS)
async def base(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=ANSWERS[request.param])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url(""))


async def test_what_is_no_list_of_files_or_citations_is_a_502(base: str) -> None:
    with pytest.raises(ApiError, match="something else than files") as files:
        await HostFiles(base).list("ann", "key")
    with pytest.raises(ApiError, match="something else than citations") as citations:
        await HostCitations(base).cited("ann", "key", ["【1†L1】"])
    assert files.value.status == citations.value.status == 502
