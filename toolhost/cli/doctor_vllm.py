"""`toolhost doctor --client vllm`: whether a vLLM that is started here would find and use this host.

Above: `doctor`. Below: `config`, `namespaces.registry`. Connects to the host's own address only, and to no proxy.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from toolhost.cli.findings import Finding
from toolhost.config import Settings, proxies, vllm_labels
from toolhost.namespaces.registry import NAMESPACES

ANSWER_S = 5.0
LOOK_S = 30.0
UNPINNED = ((0, 13), (0, 29))  # these do not pin mcp, and do not start beside mcp 2
TOOLS = {  # what a Responses request says to enable a namespace, and the label that vLLM wants on its list for it
    "python": ({"type": "code_interpreter", "container": {"type": "auto"}}, None),
    "browser": ({"type": "web_search_preview"}, None),
    "container": ({"type": "mcp", "server_label": "container"}, "container"),
}
ASK_VERSIONS = (
    "import importlib.metadata as m\n"
    "for name in ('vllm', 'mcp'):\n"
    "    try: print(m.version(name))\n"
    "    except m.PackageNotFoundError: print('')\n"
)


def check_vllm(settings: Settings, name: str | None) -> Iterator[Finding]:
    """`name`: how vLLM will name this host; None is what others on the network call it."""
    yield from _reach(settings)
    yield from _accepts(settings, name or client_name(settings))
    yield from _versions(shutil.which("vllm"))
    yield from _proxies(name or client_name(settings))
    yield from _labels(vllm_labels())


def client_name(settings: Settings) -> str:
    """What other machines call this host: its name, or the address that it listens on."""
    host, _ = settings.server.address
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def vllm_command(settings: Settings, name: str | None) -> str:
    """What starts vLLM with every namespace of this host."""
    address = _address(name or client_name(settings), settings.server.address[1])
    prefix = settings.server.public_path or settings.server.root_path
    servers = ",".join(f"{address}{prefix}/{namespace}" for namespace in NAMESPACES)
    labels = ",".join(label for _, label in _tools() if label)
    before = f"VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS={labels} " if labels else ""
    return f"{before}vllm serve openai/gpt-oss-20b --port 8001 --tool-server {servers}"


def request_to_try() -> str:
    """A request to vLLM that uses every namespace."""
    body = {
        "model": "openai/gpt-oss-20b",
        "input": "Use python to write the first 20 primes to /mnt/data/primes.txt, and say their sum.",
        "tools": [tool for tool, _ in _tools()],
    }
    data = json.dumps(body)
    return f"curl -s http://localhost:8001/v1/responses -H 'content-type: application/json' -d '{data}'"


def _tools() -> list[tuple[dict[str, object], str | None]]:
    return [TOOLS[namespace] for namespace in NAMESPACES if namespace in TOOLS]  # type: ignore[misc]


def _reach(settings: Settings) -> Iterator[Finding]:
    if settings.server.loopback:
        what = f"{settings.server.listen} can be reached from this machine only"
        mend = "for a vLLM elsewhere, or in a container: --listen 0.0.0.0:8000 --tokens-file FILE"
        yield Finding("reach", "weak", what, mend)


def _accepts(settings: Settings, name: str) -> Iterator[Finding]:
    """Asks the host that runs, as vLLM would name it: vLLM does not say that a Host header was refused."""
    host, port = settings.server.address
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    header = _address(name, port)
    connection = http.client.HTTPConnection(reachable, port, timeout=ANSWER_S)
    try:
        connection.request("GET", f"{settings.server.root_path}/livez", headers={"Host": header})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        what = f"no host answers at {settings.server.listen}; vLLM ends at its start when it cannot list tools"
        yield Finding("host", "weak", what, "start it first: toolhost serve")
        return
    finally:
        connection.close()
    if status == 421:
        mend = f"toolhost serve --allowed-host {name} (again for every other name)"
        yield Finding("host", "wrong", f"the host that runs refuses requests to {header}", mend)
    elif status == 200:
        yield Finding("host", "ok", f"the host that runs takes requests to {header}")
    else:
        what = f"what answers at {settings.server.listen} is not this version of toolhost (status {status})"
        yield Finding("host", "wrong", what, "stop it, or give another --listen")


def _versions(program: str | None) -> Iterator[Finding]:
    """The versions in the environment of the `vllm` command."""
    if program is None:
        yield Finding("vllm", "weak", "there is no `vllm` command on this PATH", "run this where vLLM is installed too")
        return
    found = _ask(Path(program))
    if found is None:
        yield Finding("vllm", "weak", f"cannot tell which versions {program} uses")
        return
    vllm, mcp = found
    if UNPINNED[0] <= _numbers(vllm) <= UNPINNED[1] and _numbers(mcp) >= (2, 0):
        what = f"vLLM {vllm} does not start beside mcp {mcp} (it does not pin it)"
        yield Finding("vllm", "wrong", what, f"{_python_of(Path(program))} -m pip install 'mcp<2'")
    elif not mcp:
        what, mend = f"vLLM {vllm} has no mcp package beside it: --tool-server fails", "pip install mcp there"
        yield Finding("vllm", "wrong", what, mend)
    else:
        yield Finding("vllm", "ok", f"vLLM {vllm} with mcp {mcp}")


def _ask(program: Path) -> tuple[str, str] | None:
    python = _python_of(program)
    if python is None:
        return None
    try:
        command = [python, "-I", "-c", ASK_VERSIONS]
        said = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    vllm, mcp, *_ = (*said.splitlines(), "", "")
    return (vllm, mcp) if vllm else None


def _python_of(program: Path) -> str | None:
    """The interpreter that a console script names in its first line."""
    try:
        with program.open("rb") as opened:
            line = opened.readline(4096).decode(errors="replace")
    except OSError:
        return None
    return line[2:].strip() if line.startswith("#!/") and "python" in line else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _proxies(name: str) -> Iterator[Finding]:
    found = proxies(name)
    if found:
        what = f"{', '.join(sorted(found))} is set: a vLLM started from here asks the proxy for {name}"
        yield Finding("client proxy", "wrong", what, f"export no_proxy=localhost,127.0.0.1,{name}")


def _labels(labels: frozenset[str]) -> Iterator[Finding]:
    missing = [label for _, label in _tools() if label and label not in labels]
    if missing:
        what = f"without VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS={','.join(missing)} vLLM leaves {', '.join(missing)} out"
        yield Finding("labels", "weak", what, "set it for `vllm serve`, as the command below does")
    else:
        yield Finding("labels", "ok", f"VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS is {','.join(sorted(labels))}")


def _address(name: str, port: int) -> str:
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
