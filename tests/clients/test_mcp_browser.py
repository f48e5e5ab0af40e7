"""The browser with the official clients of three generations."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.clients.drive import drive
from tests.support.host import RunningHost

pytestmark = [pytest.mark.clients, pytest.mark.bubblewrap]


@pytest.fixture(scope="module")
def browsing_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    running = RunningHost(tmp_path_factory.mktemp("browsing") / "state").start()
    yield running
    running.purge()


@pytest.mark.parametrize("client", ["mcp-1.12", "mcp-1", "mcp-2"])
def test_pages_stay_from_connection_to_connection(browsing_host: RunningHost, client: str) -> None:
    headers = {"x-session-id": f"browse-{client}"}
    script = [
        {"headers": headers, "calls": [["search", {"query": "corpus", "topn": 2}]]},
        {"headers": headers, "calls": [["open", {"id": 0}], ["open", {"cursor": 7}], ["cleanup_session", {}]]},
    ]
    report = drive(client, "mcp_sse.py", browsing_host.url + "/browser/sse", json.dumps(script))
    assert report["name"] == "browser"
    assert {"search", "open", "find"} <= set(report["tools"])
    assert report["instructions"].splitlines()[-1].startswith("sources=web")
    (searched,), (opened, beyond, _) = report["connections"]
    assert searched["text"].startswith("[0] corpus\n**viewing lines [0 - ")
    assert opened["text"].startswith("[1] ")
    assert (beyond["is_error"], beyond["text"]) == (
        True,
        "Cursor `7` is out of range. Available cursor indices: [0 - 1].",
    )
    assert all(result["blocks"] == 1 for result in (searched, opened, beyond))
