"""What a user without a clone gets: the wheel in an empty environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession
from mcp.client.sse import sse_client

from tests.support.host import RunningHost, free_port

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment in which only the wheel was installed."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (directory / "dist").glob("toolhost-*.whl")
    venv.create(directory / "venv", with_pip=True)
    bin_directory = directory / "venv" / "bin"
    install = [bin_directory / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return bin_directory


def run(bin_directory: Path, *arguments: str, home: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """`toolhost …` of the wheel, away from the clone, with a home of its own (so nothing is set up yet)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TOOLHOST_", "PYTHON"))}
    return subprocess.run(
        [bin_directory / "toolhost", *arguments],
        cwd=home,
        env={**environment, "HOME": str(home), "XDG_DATA_HOME": "", "XDG_STATE_HOME": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_help_and_version_work(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, "--help", home=tmp_path)
    assert shown.returncode == 0
    assert "setup" in shown.stdout and "serve" in shown.stdout
    assert run(installed, "--version", home=tmp_path).stdout.split()[-1].count(".") == 2


def test_serve_names_setup_when_the_environment_is_missing(installed: Path, tmp_path: Path) -> None:
    refused = run(installed, "serve", "--listen", f"127.0.0.1:{free_port()}", "--backend", "bubblewrap", home=tmp_path)
    assert refused.returncode == 2
    assert "toolhost setup" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_wheel_has_the_documentation_that_the_browser_searches_at_first(installed: Path, tmp_path: Path) -> None:
    indexed = """
import sys
from pathlib import Path
from toolhost.browsing.own_documents import add_own_documents
from toolhost.browsing.sections import FileConverter
from toolhost.search.corpus import Corpus

corpus = Corpus(Path(sys.argv[1]), FileConverter())
add_own_documents(corpus)
print(*(collection.name for collection in corpus.collections()))
print(*sorted(hit.url for hit in corpus.search("sandbox browser", 20)))
corpus.close()
"""
    command = [installed / "python", "-c", indexed, str(tmp_path / "corpus.sqlite")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    collections, urls = done.stdout.splitlines()
    assert collections == "toolhost"
    assert {"corpus://toolhost/README.md", "corpus://toolhost/browser.md"} <= set(urls.split())


def test_setup_then_serve_gives_a_python_that_remembers(installed: Path, tmp_path: Path) -> None:
    made = run(installed, "setup", home=tmp_path, timeout=280)
    assert made.returncode == 0, made.stderr
    assert "installing packages" in made.stdout + made.stderr, "progress is shown"
    again = run(installed, "setup", home=tmp_path)
    assert again.returncode == 0
    assert "installing packages" not in again.stdout + again.stderr, "the second time there is nothing to do"

    host = RunningHost(
        tmp_path / "state",
        python=installed / "python",
        environment={"HOME": str(tmp_path), "XDG_DATA_HOME": "", "XDG_STATE_HOME": "", "PYTHONPATH": ""},
    ).start()
    try:
        script = [
            {
                "headers": {"x-session-id": "wheel"},
                "calls": [["python", {"code": "import numpy; x = numpy.arange(3)"}]],
            },
            {"headers": {"x-session-id": "wheel"}, "calls": [["python", {"code": "int(x.sum())"}]]},
        ]
        report = asyncio.run(connections(host, script))
    finally:
        host.purge()
    assert report[1] == ["3"]


async def connections(host: RunningHost, script: list[dict[str, Any]]) -> list[list[str]]:
    texts = []
    for one in script:
        async with (
            sse_client(host.url + "/sse", headers=one["headers"]) as streams,
            ClientSession(*streams) as session,
        ):
            await session.initialize()
            results = [await session.call_tool(tool, arguments) for tool, arguments in one["calls"]]
            texts.append([result.content[0].text for result in results])  # type: ignore[union-attr]
    return texts
