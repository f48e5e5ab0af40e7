"""What `docker inspect` says of a sandbox, and what code inside can do about it. Real containers of this engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxes.backends.docker_container import LABEL
from sandboxes.backends.docker_sandboxes import Sandboxes
from sandboxes.spec import Ending, Execution, Handle, PythonCall, State
from sandboxes.stores.sqlite import SqliteStore
from sandboxes.testing.host import SuiteHost, attach, text_of
from tests.sandboxes.backends.docker_host import SMALL, DockerHost, engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

SHARED = pytest.param({}, id="runc")
OWN = pytest.param({"runtime": "runsc"}, id="runsc", marks=pytest.mark.runsc)


class Inside:
    """A session whose code runs in a container of its own."""

    def __init__(self, at: Any, place: DockerHost) -> None:
        self.at = at
        self.place = place

    async def run(self, code: str, timeout_s: float = 60.0) -> Any:
        return await self.at.run(Execution(PythonCall(code), timeout_s=timeout_s))

    async def says(self, code: str, timeout_s: float = 60.0) -> str:
        """What the code printed or raised."""
        return text_of(await self.run(code, timeout_s)).strip()

    async def answers(self) -> bool:
        return await self.says("6 * 7") == "42"

    def inspect(self) -> dict[str, Any]:
        [container] = self.place.containers()
        api = engine()
        try:
            found: dict[str, Any] = api.inspect_container(container["Id"])
            return found
        finally:
            api.close()


@asynccontextmanager
async def sandbox(directory: Path, options: dict[str, Any] | None = None) -> AsyncIterator[Inside]:
    place = DockerHost(directory, options or {})
    host = SuiteHost(
        backend=lambda owner: place.backend(owner),
        store=lambda: SqliteStore(directory / "ledger.db"),
        owner=place.owner,
        stranger=place.stranger,
        leftovers=place.leftovers,
        state=directory,
        spec=SMALL,
    )
    try:
        async with host.manager() as manager:
            inside = Inside(attach(manager, "a"), place)
            assert await inside.answers()
            yield inside
    finally:
        await host.clear()
    assert place.leftovers() == []


@pytest.fixture
async def inside(tmp_path: Path) -> AsyncIterator[Inside]:
    async with sandbox(tmp_path) as made:
        yield made


# --- as the engine tells it ------------------------------------------------------------------------------------------


async def test_every_guarantee_is_in_what_the_engine_reports(inside: Inside) -> None:
    found = inside.inspect()
    host = found["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert sorted(name.removeprefix("CAP_") for name in host["CapAdd"]) == ["KILL", "SETGID", "SETUID"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] == host["MemorySwap"] == SMALL.limits.memory_bytes
    assert host["NanoCpus"] == int(SMALL.limits.cpus * 1e9)
    assert host["PidsLimit"] == SMALL.limits.processes + 8
    assert host["ShmSize"] == SMALL.limits.shm_bytes
    assert set(host["Tmpfs"]) == {"/tmp", "/dev/shm"}
    assert all("noexec" in options and "nr_inodes" in options for options in host["Tmpfs"].values())
    assert host["LogConfig"]["Config"] == {"max-size": "256k", "max-file": "1"}
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["IpcMode"] == "private"
    assert host["PidMode"] == host["UTSMode"] == ""
    assert not host["Devices"]
    assert found["Config"]["User"] == "0:0"


@pytest.mark.parametrize("options", [{}, {"channel": "attach"}], ids=["socket", "attach"])
async def test_a_state_directory_may_have_any_name(tmp_path: Path, options: dict[str, Any]) -> None:
    directory = tmp_path / "a:b,ro ü"
    directory.mkdir()
    async with sandbox(directory, options) as inside:
        assert await inside.says("open('/mnt/data/f', 'w').write('kept')") == "4"


async def test_labels_name_owner_purpose_version_and_no_session(inside: Inside) -> None:
    labels = inside.inspect()["Config"]["Labels"]
    assert labels[f"{LABEL}owner"] == inside.place.owner.id
    assert labels[f"{LABEL}purpose"] == "sandbox"
    assert labels[f"{LABEL}version"] == "1"
    assert len(labels[f"{LABEL}sandbox"]) == 32
    assert "alice" not in json.dumps(labels)


async def test_neither_nonce_nor_ticket_nor_secret_can_be_read_off_the_container(inside: Inside) -> None:
    found = inside.inspect()
    told = json.dumps(found)
    owner, sandbox_id = inside.place.owner, found["Config"]["Labels"][f"{LABEL}sandbox"]
    assert owner.nonce(sandbox_id) not in told
    assert owner.secret.hex() not in told
    for environ in ("/proc/1/environ", "/proc/1/mem", "/proc/1/fd", "/proc/1/maps"):
        assert "Error" in await inside.says(f"import os\nopen({environ!r}, 'rb').read()"), environ
    assert owner.nonce(sandbox_id) not in await inside.says(
        "import os\nprint(open('/proc/1/cmdline').read(), os.environ)"
    )


@pytest.mark.parametrize("options", [SHARED, OWN])
async def test_pid_1_has_exactly_three_capabilities_and_user_code_none(tmp_path: Path, options: dict[str, Any]) -> None:
    async with sandbox(tmp_path, options) as inside:
        code = (
            "def caps(pid):\n"
            "    fields = dict(line.split(':', 1) for line in open(f'/proc/{pid}/status'))\n"
            "    names = ('CapPrm', 'CapEff', 'CapInh', 'CapAmb')\n"
            "    return [int(fields[name], 16) for name in names if name in fields]\n"
            "import os\n"
            "caps('self'), caps(1)[:2], os.getuid() != 0, os.getgroups()"
        )
        none = [0, 0, 0] if "runtime" in options else [0, 0, 0, 0]  # gVisor tells nothing of the ambient set
        three = (1 << 5) | (1 << 6) | (1 << 7)  # KILL, SETGID, SETUID (capabilities(7))
        assert await inside.says(code) == str((none, [three, three], True, []))


# --- as code inside finds it -----------------------------------------------------------------------------------------

# Each must end in an error of the kernel's, not in one of the attempt's own.
DENIED = ("Operation not permitted", "Permission denied", "Read-only file system", "No such file or directory")

REFUSED = {
    "a raw socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "the engine's socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')",
    "the channel": "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/toolhost/channel')",
    "the channel's directory": "import os\nos.listdir('/run/toolhost')",
    "a write to the root": "open('/etc/planted', 'w')",
    "a write to the agent": "open('/opt/toolhost/agent/wire.py', 'a')",
    "another uid": "import os\nos.setuid(0)",
    "killing the agent": "import os\nos.kill(1, 9)",
    "stopping the agent": "import os\nos.kill(1, 19)",
    "tracing the agent": "open('/proc/1/mem', 'rb').read(1)",
    "the agent's descriptors": "import os\nos.listdir('/proc/1/fd')",
    "a mount": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0, os.strerror(ctypes.get_errno())",
    "a raw device": "import os\nos.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
    "a keyring": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.syscall(250, 1, 0, 0, 0, 0) >= 0, os.strerror(ctypes.get_errno())",
    "a program in /tmp": "import os, shutil, subprocess\nshutil.copy('/bin/true', '/tmp/true')\n"
    "os.chmod('/tmp/true', 0o755)\nsubprocess.run(['/tmp/true'], check=True)",
    "a user namespace": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())",
}


async def test_what_code_inside_must_not_do_is_refused_by_the_kernel(inside: Inside) -> None:
    said = {name: (await inside.says(code)).rpartition("\n")[2] for name, code in REFUSED.items()}
    assert {name: text for name, text in said.items() if not any(reason in text for reason in DENIED)} == {}
    assert await inside.answers()


@pytest.mark.parametrize("options", [SHARED, OWN])
async def test_without_egress_there_is_no_network_but_the_sandboxs_own_loopback(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with sandbox(tmp_path, options) as inside:
        assert await inside.says("import socket\n[name for _, name in socket.if_nameindex()]") == "['lo']"
        unreachable = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
        said = await inside.says(unreachable)
        assert "Network is unreachable" in said or "No route to host" in said  # Linux; gVisor


async def test_set_uid_program_gains_nothing(inside: Inside) -> None:
    code = "import os\nopen('/proc/self/status').read().split('NoNewPrivs:')[1].split()[0]"
    assert await inside.says(code) == "'1'"


async def test_only_its_own_processes_are_seen(inside: Inside) -> None:
    code = "import os\nsorted(open(f'/proc/{p}/comm').read().strip() for p in os.listdir('/proc') if p.isdigit())"
    assert set(json.loads((await inside.says(code)).replace("'", '"'))) <= {"python3", "find"}


# --- used up ---------------------------------------------------------------------------------------------------------


async def test_full_tmp_leaves_the_agent_the_files_and_the_next_call_alive(inside: Inside) -> None:
    code = (
        "open('/mnt/data/kept.txt', 'w').write('kept')\n"
        "import errno\n"
        "for place in ('/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        with open(f'{place}/full', 'wb') as file:\n"
        "            for _ in range(4096):\n"
        "                file.write(bytes(1 << 20)); file.flush()\n"
        "    except OSError as error:\n"
        "        print(place, errno.errorcode[error.errno])\n"
    )
    assert await inside.says(code) == "/tmp ENOSPC\n/dev/shm ENOSPC"
    assert await inside.says("x = 1; open('/mnt/data/kept.txt').read()") == "'kept'"
    assert await inside.says("x") == "1"


async def test_empty_files_fill_tmp_before_they_fill_the_memory(inside: Inside) -> None:
    code = (
        "import errno, os\n"
        "for place in ('/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        for n in range(10_000_000): os.close(os.open(f'{place}/{n}', os.O_CREAT | os.O_WRONLY))\n"
        "    except OSError as error:\n"
        "        print(place, errno.errorcode[error.errno])\n"
    )
    assert await inside.says(code, 30) == "/tmp ENOSPC\n/dev/shm ENOSPC"
    assert await inside.answers()
    await inside.run("os._exit(0)")  # there is room for a new interpreter too
    assert await inside.answers()


async def test_memory_bomb_ends_the_interpreter_and_neither_agent_nor_files(inside: Inside) -> None:
    await inside.says("open('/mnt/data/kept.txt', 'w').write('kept')")
    before = inside.inspect()["State"]["Pid"]
    outcome = await inside.run("held = []\nwhile True: held.append(bytearray(os.urandom(1 << 20) if 0 else 1 << 20))")
    assert outcome.receipt.state is State.LOST
    assert outcome.receipt.ending is Ending.KILLED
    assert outcome.receipt.cause.kind.value == "out_of_memory"
    assert await inside.says("open('/mnt/data/kept.txt').read()") == "'kept'"
    assert inside.inspect()["State"]["Pid"] == before


@pytest.mark.runsc
async def test_memory_bomb_under_a_kernel_of_its_own_ends_the_sandbox_and_keeps_its_files(tmp_path: Path) -> None:
    async with sandbox(tmp_path, {"runtime": "runsc"}) as inside:
        assert "memory-limit-ends-sandbox" in inside.place.backend().differences
        await inside.says("open('/mnt/data/kept.txt', 'w').write('kept')")
        outcome = await inside.run("held = []\nwhile True: held.append(bytearray(1 << 20))")
        assert outcome.receipt.state is State.LOST
        assert await inside.says("open('/mnt/data/kept.txt').read()") == "'kept'"


@pytest.mark.runsc
async def test_memory_that_ran_out_is_named_where_the_engine_heard_of_the_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Sandboxes._state

    def without_the_flag(sandboxes: Sandboxes, handle: Handle) -> dict[str, Any] | None:
        state = known(sandboxes, handle)
        return state and {**state, "OOMKilled": False}

    monkeypatch.setattr(Sandboxes, "_state", without_the_flag)
    async with sandbox(tmp_path, {"runtime": "runsc"}) as inside:
        outcome = await inside.run("held = []\nwhile True: held.append(bytearray(1 << 20))")
        assert outcome.receipt.cause.kind.value == "out_of_memory"
        assert await inside.answers()


@pytest.mark.parametrize("options", [SHARED, OWN])
async def test_fork_bomb_ends_and_the_next_call_works(tmp_path: Path, options: dict[str, Any]) -> None:
    async with sandbox(tmp_path, options) as inside:
        code = "import os, time\nfor _ in range(10_000):\n    if os.fork() == 0:\n        time.sleep(600)"
        outcome = await inside.run(code, 20)
        assert outcome.receipt.ending is not Ending.OK
        assert await inside.answers()


async def test_full_data_directory_is_stopped_and_the_session_goes_on(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as inside:
        limit = SMALL.limits.disk_bytes
        code = (
            f"import os\nwith open('/mnt/data/full', 'wb') as f: os.posix_fallocate(f.fileno(), 0, {limit + (1 << 20)})"
        )
        outcome = await inside.run(code)
        assert outcome.receipt.ending is not Ending.OK
        assert (
            await inside.says("import os\nos.remove('/mnt/data/full') if os.path.exists('/mnt/data/full') else None")
            is not None
        )
        assert await inside.answers()
