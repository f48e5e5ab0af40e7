"""What hostile code tries, on every backend: each test shows what stopped it.

`REFUSED` are attempts that end at once: code that runs inside, and the way in which it must fail. The other attacks
have a test each. A test's name, or the attempt's, stands in the table of docs/isolation.md. A guarantee that a backend
does not give is one of its `differences`, and the test asserts what is the case there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from sandboxes.errors import AttemptUnknown, CallRefused, SandboxError, SessionUnknown
from sandboxes.manager import Attachment, SessionManager
from sandboxes.spec import CauseKind, Ending, KeyKind, Retention, SessionKey, SessionRequest, State
from sandboxes.testing.backend_suite import SOON_S, run, started
from sandboxes.testing.host import SuiteHost, attach, text_of

PRELUDE = """
import ctypes, errno, os, resource, signal, socket, stat, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
def syscall(x86_64, aarch64, *arguments):
    call('syscall', x86_64 if os.uname().machine == 'x86_64' else aarch64, *arguments)
"""

# name -> (code, pattern of how it is refused). Numbers of system calls: x86-64, aarch64.
NO = r"PermissionError|Operation not permitted"
ABSENT = r"FileNotFoundError"
NOT = rf"{NO}|Function not implemented"
REFUSED = {
    # The agent: PID 1.
    "read the agent's environment": ("open('/proc/1/environ').read()", NO),
    "read the agent's memory": ("open('/proc/1/mem', 'rb')", NO),
    "open the agent's descriptors": (
        # gVisor's kernel lets them be listed; what is none of the agent's alone does not count.
        "for name in os.listdir('/proc/1/fd'):\n    if os.readlink('/proc/1/fd/' + name) == '/dev/null': continue\n"
        "    for how in (os.O_RDONLY, os.O_WRONLY):\n        try: os.open(f'/proc/1/fd/{name}', how | os.O_NONBLOCK)\n"
        "        except OSError: continue\n        print('OPENED', name)\n"
        "raise PermissionError('none can be opened')",
        NO,
    ),
    "reach through the agent's root": ("os.listdir('/proc/1/root/')", NO),
    "ptrace the agent": ("call('ptrace', 16, 1, 0, 0)", NOT),
    "write into the agent's memory": (
        "data = ctypes.create_string_buffer(8)\n"
        "vector = struct.pack('PN', ctypes.addressof(data), 8)\n"
        "call('process_vm_writev', 1, vector, 1, vector, 1, 0)",
        NOT,
    ),
    "take a descriptor of the agent": (
        "syscall(438, 438, os.pidfd_open(1), 3, 0)", NOT,
    ),
    "take the agent's open files away": ("resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))", NO),
    "take the agent's cpu time away": ("resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))", NO),
    "put the agent behind in the queue": ("os.setpriority(os.PRIO_PROCESS, 1, 19)", NO),
    "give the agent the idle class": ("os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))", f"{NOT}|Invalid"),
    "change the agent's programs": ("open('/opt/toolhost/agent/wire.py', 'a')", f"{NO}|Read-only file system"),
    # Privileges.
    "become root": ("os.setuid(0)", f"{NO}|Invalid argument"),
    "leave the root directory": ("os.chroot('/tmp')", NO),
    "mount": ("call('mount', b'none', b'/tmp', b'tmpfs', 0, None)", NO),
    "unmount": ("call('umount2', b'/mnt/data', 2)", NO),
    "move to another namespace": ("syscall(308, 268, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0)", f"{NOT}|{ABSENT}"),
    "make a block device": ("os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))", NO),
    "make a character device": ("os.mknod('memory', stat.S_IFCHR | 0o600, os.makedev(1, 1))", NO),
    "read the machine's memory": ("open('/dev/mem', 'rb')", f"{ABSENT}|{NO}"),
    "read the kernel's log": ("open('/dev/kmsg', 'rb')", f"{ABSENT}|{NO}"),
    "trigger SysRq": ("open('/proc/sysrq-trigger', 'w').write('h')", f"{ABSENT}|{NO}|Read-only file system"),
    "change a kernel setting": (
        "open('/proc/sys/kernel/core_pattern', 'w').write('x')", f"{ABSENT}|{NO}|Read-only file system",
    ),
    "change a control group": (
        "import glob\nplaces = glob.glob('/sys/fs/cgroup/**/*.max', recursive=True) + "
        "glob.glob('/sys/fs/cgroup/memory/memory.limit_in_bytes') or ['/sys/fs/cgroup/memory.max']\n"
        "open(places[0], 'w').write('max')",
        f"{ABSENT}|{NO}|Read-only file system",
    ),
    "load a program into the kernel": ("syscall(321, 280, 5, None, 0)", NOT),
    "read the session keyring": ("syscall(250, 219, 0, -3, 0)", NOT),
    "add a key": ("syscall(248, 217, b'user', b'k', b'v', 1, -3)", NOT),
    "open a file by handle": ("syscall(304, 265, -100, b'\\0' * 64, 0)", f"{NOT}|not supported"),
    "change the system": ("open('/usr/planted', 'w')", f"{NO}|Read-only file system"),
    "change the accounts": ("open('/etc/passwd', 'a')", f"{NO}|Read-only file system"),
    # Ways out.
    "the engine's socket": ("socket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')", ABSENT),
    "the engine's socket in /run": ("socket.socket(socket.AF_UNIX).connect('/run/docker.sock')", ABSENT),
    "a raw socket": ("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", NO),
    "a packet socket": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", f"{NO}|Address family not supported"),
    "a socket of the hypervisor": ("socket.socket(40, socket.SOCK_STREAM)", f"{NO}|Address family not supported"),
    "a ring of the kernel's": (
        "ring = ctypes.create_string_buffer(256)\nsyscall(425, 425, 4, ring)", NOT,
    ),
    "memory whose faults it serves": ("syscall(323, 282, 0)", NOT),
    "a raw disk": (
        "names = [name for name in os.listdir('/dev') if stat.S_ISBLK(os.lstat('/dev/' + name).st_mode)]\n"
        "open('/dev/' + (names or ['sda'])[0], 'rb')",
        f"{ABSENT}|{NO}",
    ),
}  # fmt: skip

# gVisor's kernel lets these pass: the container's environment holds nothing of the agent's (another test reads it and
# looks), and niceness, which can be set, has no effect there.
HARMLESS_WITH_OWN_KERNEL = {"read the agent's environment", "put the agent behind in the queue"}

# What would forge the agent's or the host's word: frames on every descriptor but the output's.
FORGERY = """
import json, os
receipt = {'session': 'mallory/request/x', 'epoch': 99, 'sequence': 99, 'attempt_id': 'forged', 'digest': '0' * 64,
           'queued_at': 1.0, 'started_at': 1.0, 'ended_at': 2.0, 'ending': 'ok', 'state': 'kept', 'bytes_out': 0,
           'bytes_cut': 0, 'cause': None}
frame = json.dumps({'t': KIND, 'id': 1, 'n': NUMBER, 'outcome': 'ok', 'receipt': receipt, 'value': 'forged',
                    'epoch': 99, 'sequence': 99}).encode() + b'\\n'
output = os.fstat(1)
for fd in range(3, 2048):
    try:
        if not os.path.samestat(os.fstat(fd), output):
            os.write(fd, frame)
    except OSError:
        pass
"""

FEW_PROCESSES = """import os, time
def few():
    return len([name for name in os.listdir('/proc') if name.isdigit()]) <= 5
until = time.monotonic() + 10
while not few() and time.monotonic() < until:
    time.sleep(0.05)
few()"""
BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
MEMORY_OF_MANY = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        hog = []
        while True:
            hog.append(b'x' * (1 << 20))
            time.sleep(0.0005)
hog = []
while True:
    hog.append(b'x' * (1 << 20))
    time.sleep(0.0005)
"""
SEEN = """
import json, os
def read(path):
    try:
        with open(path, 'rb') as file:
            return file.read(1 << 16).decode('utf-8', 'replace')
    except OSError:
        return ''
pids = [name for name in os.listdir('/proc') if name.isdigit()]
json.dumps({
    'environments': [dict(os.environ), *(read(f'/proc/{pid}/environ') for pid in pids)],
    'commands': [read(f'/proc/{pid}/cmdline') for pid in pids],
    'mounts': read('/proc/self/mountinfo'),
    'interfaces': [line.split(':')[0].strip() for line in read('/proc/net/dev').splitlines() if ':' in line],
    'routes': read('/proc/net/route').splitlines()[1:],
    'status': read('/proc/self/status'),
})
"""


class AttackSuite:
    """Each test has a session of its own on the module's `host`."""

    @pytest.fixture
    async def manager(self, host: SuiteHost) -> AsyncIterator[SessionManager]:
        async with host.manager() as manager:
            yield manager

    @pytest.fixture
    async def at(self, manager: SessionManager) -> Attachment:
        return attach(manager, "a")

    async def test_what_would_lead_out_is_refused(self, manager: SessionManager, at: Attachment) -> None:
        await run(at, PRELUDE)
        wrong = {}
        for name, (code, how) in REFUSED.items():
            outcome = await run(at, code)
            last = (outcome.error or "").strip().rpartition("\n")[2]
            opened = "OPENED" in text_of(outcome)
            if opened or outcome.receipt.ending is not Ending.RAISED or not re.search(how, last):
                wrong[name] = last or str(outcome.receipt.ending)
        if "kernel-shared" not in manager._backend.differences:
            wrong = {name: last for name, last in wrong.items() if name not in HARMLESS_WITH_OWN_KERNEL}
        assert wrong == {}
        assert text_of(await run(at, "1 + 1")) == "2"

    # --- seeing ------------------------------------------------------------------------------------------------------

    async def test_the_hosts_files_and_environment_are_not_there(
        self, host: SuiteHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        secret = secrets.token_hex(16)
        (host.state / "secret").write_text(secret)
        monkeypatch.setenv("TOOLHOST_TEST_SECRET", secret)
        async with host.manager() as manager:
            at = attach(manager, "a")
            seen = text_of(await run(at, SEEN))
            assert secret not in seen
            assert "TOOLHOST_TEST_SECRET" not in seen
            for path in (f"{host.state}/secret", f"/proc/1/root{host.state}/secret"):
                assert re.search(f"{ABSENT}|{NO}", text_of(await run(at, f"open({path!r}).read()")))
            nonce = host.owner.nonce(manager._keeper.sessions[at.key].sandbox.handle.sandbox_id)  # type: ignore[union-attr]
            assert nonce not in seen

    async def test_another_sandboxs_processes_and_files_are_not_seen(self, manager: SessionManager) -> None:
        one, other = attach(manager, "a"), attach(manager, "b")
        mark = secrets.token_hex(8)
        hide = f"import subprocess\nopen('/mnt/data/{mark}', 'w').close()\nopen('/tmp/{mark}', 'w').close()\n"
        await run(one, f"{hide}child = subprocess.Popen(['sh', '-c', 'sleep 1000; : {mark}'])")
        assert mark in text_of(await run(one, SEEN))
        assert mark not in text_of(await run(other, SEEN))
        find = "import os\n[name for place in ('/mnt/data', '/tmp', '/dev/shm') for name in os.listdir(place)]"
        assert mark not in text_of(await run(other, find))
        assert "b'gone'" in text_of(
            await run(one, "open('/dev/shm/x', 'wb').write(b'gone')\nopen('/dev/shm/x', 'rb').read()")
        )
        assert "FileNotFoundError" in text_of(await run(other, "open('/dev/shm/x')"))

    async def test_there_is_no_interface_no_route_and_no_way_to_the_hosts_own_addresses(self, at: Attachment) -> None:
        await run(at, SEEN)
        seen = await run(at, "found = json.loads(_)\nfound['interfaces'], found['routes']")
        assert text_of(seen) in ("(['lo'], [])", "([], [])")
        with _listeners() as (addresses, abstract, accepted):
            code = (
                "import socket\nfor address in " + repr(addresses) + ":\n"
                "    family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET\n"
                "    with socket.socket(family) as tried:\n        tried.settimeout(2)\n"
                "        try:\n            tried.connect(tuple(address))\n            print('REACHED', address)\n"
                "        except OSError as error:\n            print(error)\n"
                "with socket.socket(socket.AF_UNIX) as tried:\n"
                f"    try:\n        tried.connect(chr(0) + {abstract!r})\n        print('REACHED')\n"
                "    except OSError as error:\n        print(error)\n"
            )
            said = text_of(await run(at, code))
            assert "REACHED" not in said
            assert len(said.splitlines()) == len(addresses) + 1
            assert accepted() == 0

    # --- the agent ---------------------------------------------------------------------------------------------------

    async def test_signals_to_the_agent_change_nothing(self, manager: SessionManager, at: Attachment) -> None:
        await run(at, "x = 1")
        await run(at, "import os\nfor number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass")
        assert (await run(at, "x")).receipt.epoch == 1
        await run(at, "os.kill(-1, 9)", timeout_s=5)  # everything that it may kill, but itself
        await run(at, "import ctypes\nctypes.CDLL(None).kill(os.getpid(), 19)", timeout_s=1)
        after = await run(at, "'next'")
        assert (text_of(after), after.receipt.sequence) == ("'next'", 6)

    async def test_an_agent_under_load_and_without_spare_descriptors_answers(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        hogs = (
            "import os, subprocess, sys\n"
            "for _ in range(6):\n    subprocess.Popen([sys.executable, '-c', 'while 1: pass'])\n"
            "for which in (os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER):\n"
            "    try: os.setpriority(which, 0, 0)\n    except OSError: pass\n"
            "kept = []\ntry:\n    while True: kept.append(os.pipe())\nexcept OSError as error: print(error)\n"
            "kept = None"
        )
        assert "Too many open files" in text_of(await run(at, hogs))
        call = await started(at, "while True: pass")
        began = time.monotonic()
        assert await manager.interrupt(at.key)
        assert (await asyncio.wait_for(call, SOON_S)).receipt.ending is Ending.INTERRUPTED
        assert time.monotonic() - began < 10

    @pytest.mark.parametrize("kind", ["result", "done", "ready", "hello", "ok", "error", "nonsense"])
    async def test_forged_frames_never_become_the_agents_word(self, at: Attachment, kind: str) -> None:
        await run(at, "x = 1")
        forgery = FORGERY.replace("KIND", repr(kind)).replace("NUMBER", "9")
        outcome = await run(at, f"{forgery}\n'own'", attempt="mine")
        for number, each in ((2, outcome), (3, await run(at, "'next'"))):
            receipt = each.receipt
            assert (receipt.session, receipt.sequence) == (str(at.key), number)
            assert receipt.attempt_id != "forged"
            assert receipt.epoch in (1, 2)
            assert "forged" not in text_of(each)
        assert outcome.receipt.ending in (Ending.OK, Ending.KILLED)
        assert text_of(each) == "'next'"

    async def test_a_forged_answer_is_the_text_of_ones_own_cell_and_nothing_else(self, at: Attachment) -> None:
        forgery = FORGERY.replace("KIND", "'done'").replace("NUMBER", "1")
        outcome = await run(at, f"{forgery}\nwhile True: pass", timeout_s=1)
        assert outcome.receipt.sequence == 1
        assert outcome.receipt.epoch == 1
        # Its interpreter still runs the cell: the next one waits for it, by the ladder.
        after = await run(at, "'next'", timeout_s=1)
        assert after.receipt.sequence == 2
        assert text_of(await run(at, "'next'")) == "'next'"

    # --- exhaustion --------------------------------------------------------------------------------------------------

    async def test_a_fork_bomb_ends_at_the_process_limit_and_with_its_call(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        await run(at, "x = 1")
        outcome = await run(at, BOMB, timeout_s=2)
        if outcome.receipt.ending is Ending.LOST:  # so many processes of a kernel of its own are more than its memory
            assert "memory-limit-ends-sandbox" in manager._backend.differences
        else:
            assert outcome.receipt.ending in (Ending.TIMED_OUT, Ending.KILLED)
        assert text_of(await run(at, "'next'")) == "'next'"
        # What was killed takes a moment to be gone where the processor is busy.
        assert text_of(await run(at, FEW_PROCESSES)) == "True"
        assert text_of(await run(attach(manager, "b"), "1 + 1")) == "2"

    async def test_memory_of_many_processes_ends_at_the_limit_and_harms_nobody_else(
        self, host: SuiteHost, manager: SessionManager, at: Attachment
    ) -> None:
        bystander = attach(manager, "b")
        await run(bystander, "x = 1")
        await run(at, "open('/mnt/data/kept', 'w').write('k')")
        outcome = await run(at, MEMORY_OF_MANY, timeout_s=60)
        if "memory-limit-per-process" in manager._backend.differences:  # each has the limit, together they take more
            assert "MemoryError" in text_of(outcome)
        else:
            assert outcome.receipt.ending in (Ending.KILLED, Ending.LOST)
            assert outcome.receipt.state is State.LOST
            assert outcome.receipt.cause is not None
            assert outcome.receipt.cause.kind is CauseKind.OUT_OF_MEMORY
        assert text_of(await run(at, "open('/mnt/data/kept').read()")) == "'k'"
        assert text_of(await run(bystander, "x")) == "1"

    @pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
    async def test_memory_backed_directories_are_bounded(self, at: Attachment, place: str) -> None:
        code = (
            f"written = 0\nwith open('{place}/big', 'wb') as file:\n    while True:\n"
            "        written += file.write(b'x' * (1 << 20))\n        file.flush()"
        )
        outcome = await run(at, code, timeout_s=30)
        assert re.search("No space left on device|MemoryError", text_of(outcome)), outcome
        assert text_of(await run(at, f"import os\nos.remove('{place}/big')\nwritten < 64 << 20")) == "True"

    async def test_full_directories_in_memory_leave_room_for_the_next_call(self, host: SuiteHost) -> None:
        small = dataclasses.replace(host.spec.limits, memory_bytes=128 << 20, tmp_bytes=128 << 20, shm_bytes=64 << 20)
        host.spec = dataclasses.replace(host.spec, limits=small)
        async with host.manager() as manager:
            at = attach(manager, "a")
            for place in ("/tmp", "/dev/shm"):
                await run(at, f"with open('{place}/full', 'wb') as file:\n    while True: file.write(bytes(1 << 20))")
            await run(at, "import os\nos._exit(0)")
            assert text_of(await run(at, "6 * 7")) == "42"

    @pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
    async def test_empty_files_in_memory_leave_room_for_the_next_call(self, host: SuiteHost, place: str) -> None:
        async with host.manager() as manager:
            at = attach(manager, "a")
            fill = f"import os\nfor n in range(200_000): os.close(os.open(f'{place}/{{n}}', os.O_CREAT | os.O_WRONLY))"
            outcome = await run(at, fill, timeout_s=60)
            if manager._backend.differences.isdisjoint({"memory-limit-per-process", "memory-limit-ends-sandbox"}):
                assert "No space left on device" in text_of(outcome), outcome
            await run(at, "import os\nos._exit(0)")
            assert text_of(await run(at, "6 * 7")) == "42"

    async def test_filling_the_disk_ends_the_call_and_the_next_can_delete(self, host: SuiteHost) -> None:
        await self._fills(
            host,
            "n = 0\nwhile True:\n    n += 1\n"
            "    with open(f'/mnt/data/f{n}', 'wb') as file: file.write(b'x' * (4 << 20))",
        )

    async def test_filling_the_disk_with_empty_files_ends_the_call_too(self, host: SuiteHost) -> None:
        await self._fills(host, "n = 0\nwhile True:\n    n += 1\n    open(f'/mnt/data/f{n}', 'wb').close()")

    async def _fills(self, host: SuiteHost, code: str) -> None:
        host.spec = dataclasses.replace(host.spec, limits=dataclasses.replace(host.spec.limits, disk_bytes=24 << 20))
        async with host.manager() as manager:
            at = attach(manager, "a")
            await run(at, "x = 1")
            outcome = await run(at, code, timeout_s=60)
            notes = " ".join(outcome.notes)
            assert "24 MiB" in notes or "limit is 1536" in notes or "No space left" in text_of(outcome), outcome
            assert "disk-quota-watched" in manager._backend.differences
            delete = "import glob, os\nfor path in glob.glob('/mnt/data/f*'): os.remove(path)\n'deleted'"
            assert text_of(await run(at, delete)) == "'deleted'"

    async def test_one_process_cannot_open_more_files_than_the_limit(self, host: SuiteHost, at: Attachment) -> None:
        code = (
            "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\n"
            "except OSError as error: print(error)\nlen(kept)"
        )
        said = text_of(await run(at, code))
        assert "Too many open files" in said
        assert int(said.splitlines()[-1]) <= host.spec.limits.open_files
        assert text_of(await run(at, "kept = None\nopen('f', 'w').write('works')")) == "5"

    # --- files -------------------------------------------------------------------------------------------------------

    async def test_links_planted_in_the_data_directory_are_not_followed(
        self, host: SuiteHost, manager: SessionManager, at: Attachment
    ) -> None:
        (host.state / "secret").write_text("the host's")
        plant = (
            "import os\nos.makedirs('/tmp/outside', exist_ok=True)\nopen('/tmp/outside/own', 'w').write('own')\n"
            f"os.symlink({str(host.state / 'secret')!r}, 'link')\nos.symlink('/etc/passwd', 'accounts')\n"
            "os.symlink('/tmp/outside', 'directory')\nos.symlink('/', 'root')\nos.symlink('loop', 'loop')\n"
            "os.mkfifo('pipe')\nos.symlink('/dev/zero', 'zero')\nos.makedirs('real')"
        )
        await run(at, plant)
        files = manager.files(at.key)
        kinds = {info.path.rpartition("/")[2]: info.kind for info in (await files.list()).files}
        assert {kinds[name] for name in ("link", "accounts", "directory", "root", "loop", "zero")} == {"link"}
        assert kinds["pipe"] == "other"
        for path in ("link", "accounts", "directory/own", "root/etc/passwd", "loop", "pipe", "zero", "real"):
            with pytest.raises(CallRefused):
                async for _ in files.get(path, 1 << 20):
                    pass
        for path in ("directory/planted", "root/tmp/planted", "loop/planted"):
            with pytest.raises(CallRefused):
                await files.put(path, _pieces(b"x"), 100)
        for path in ("link", "accounts"):  # put in the link's place, not through it
            await files.put(path, _pieces(b"mine"), 100)
        assert (host.state / "secret").read_text() == "the host's"
        archive = b"".join([piece async for piece in files.tar(".", 1 << 20)])
        assert b"the host's" not in archive
        assert b"root:x:0" not in archive
        assert (
            text_of(await run(at, "sorted(os.listdir('/tmp/outside')), open('accounts').read()")) == "(['own'], 'mine')"
        )

    async def test_a_link_swapped_in_while_a_file_is_written_wins_nothing(
        self, manager: SessionManager, at: Attachment
    ) -> None:
        race = (
            "import os, threading, time\nos.makedirs('/tmp/outside', exist_ok=True)\nstop = False\n"
            "def swap():\n    while not stop:\n        try:\n"
            "            os.mkdir('d')\n            os.rename('d', 'gone') if not os.path.exists('gone') else None\n"
            "            os.symlink('/tmp/outside', 'd')\n            os.unlink('d')\n"
            "        except OSError:\n            pass\n"
            "        for name in ('gone', 'd'):\n            try: os.rmdir(name)\n            except OSError:\n"
            "                try: os.unlink(name)\n                except OSError: pass\n"
            "threading.Thread(target=swap, daemon=True).start()"
        )
        await run(at, race)
        files = manager.files(at.key)
        for _ in range(40):
            with contextlib.suppress(CallRefused, SandboxError):
                await files.put("d/planted", _pieces(b"x"), 100)
        assert text_of(await run(at, "stop = True\nos.listdir('/tmp/outside')")) == "[]"

    @pytest.mark.parametrize(
        "path",
        ["../x", "a/../../x", "/etc/passwd", "/mnt/data/../x", "a\0b", "..", "", "/mnt/database/x", "a/" * 100 + "b"],
    )
    async def test_names_that_lead_out_are_refused(self, manager: SessionManager, at: Attachment, path: str) -> None:
        await run(at, "1")
        files = manager.files(at.key)
        with pytest.raises(CallRefused):
            await files.put(path, _pieces(b"x"), 100)
        with pytest.raises(CallRefused):
            async for _ in files.get(path, 100):
                pass
        with pytest.raises(CallRefused):
            await files.remove(path)

    async def test_names_with_shell_characters_are_names(self, manager: SessionManager, at: Attachment) -> None:
        names = ["$(touch pwned)", "a;b", "`id`", "-rf", "new\nline", "quote'\"", "*", "~", "%s", "ünïcode", "a b", "#"]
        files = manager.files(at.key)
        for name in names:
            await files.put(name, _pieces(name.encode()), 100)
        found = text_of(
            await run(at, "import os\nsorted(name for name in os.listdir('.') if not name.startswith('.'))")
        )
        assert found == repr(sorted(names))
        for name in names:
            assert b"".join([piece async for piece in files.get(name, 100)]) == name.encode()
            await files.remove(name)
        assert text_of(await run(at, "[name for name in os.listdir('.') if not name.startswith('.')]")) == "[]"

    async def test_links_planted_where_results_are_saved_are_not_followed(self, at: Attachment) -> None:
        plant = (
            "import os, shutil\nos.makedirs('/tmp/outside', exist_ok=True)\n"
            "shutil.rmtree('/mnt/data/.outputs', ignore_errors=True)\nos.symlink('/tmp/outside', '/mnt/data/.outputs')"
        )
        await run(at, plant)
        outcome = await run(at, "print('x' * 100_000)")
        assert outcome.output.cut_characters > 0
        assert outcome.output.file is None
        assert any("could not be saved" in note for note in outcome.notes)
        assert text_of(await run(at, "os.listdir('/tmp/outside')")) == "[]"

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def test_one_session_id_of_two_principals_is_two_sessions(self, manager: SessionManager) -> None:
        keys = [SessionKey(principal, KeyKind.REQUEST, "same") for principal in ("alice", "mallory")]
        one, other = (manager.attach(SessionRequest(key, Retention.CHOSEN)) for key in keys)
        await run(one, "secret = 42\nopen('/mnt/data/secret', 'w').write('42')", attempt="hers")
        assert "NameError" in text_of(await run(other, "secret"))
        assert "FileNotFoundError" in text_of(await run(other, "open('/mnt/data/secret')"))
        with pytest.raises((AttemptUnknown, SessionUnknown)):
            await manager.collect(keys[1], "hers")
        assert [info.path for info in (await manager.files(keys[1]).list()).files] == []
        for kind in (KeyKind.RETAINED, KeyKind.CONNECTION):
            with pytest.raises(SessionUnknown):
                await manager.collect(SessionKey("alice", kind, "same"), "hers")

    # --- privileges --------------------------------------------------------------------------------------------------

    async def test_user_code_has_no_capability_and_set_uid_programs_gain_nothing(self, at: Attachment) -> None:
        status = dict(
            line.split(":", 1)
            for line in text_of(await run(at, "print(open('/proc/self/status').read())")).splitlines()
            if ":" in line
        )
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status.get("CapAmb", "0"), 16) == 0
        if "NoNewPrivs" in status:  # gVisor's kernel has no such line
            assert status["NoNewPrivs"].strip() == "1"
        code = (
            "import os, stat, subprocess\nfound = []\nfor directory in ('/usr/bin', '/usr/sbin', '/bin', '/sbin'):\n"
            "    for name in os.listdir(directory):\n        path = os.path.join(directory, name)\n"
            "        if os.path.exists(path) and os.stat(path).st_mode & stat.S_ISUID: found.append(path)\n"
            "said = subprocess.run(['su', '-c', 'id -u'], stdin=subprocess.DEVNULL, capture_output=True, text=True)\n"
            "'0' in said.stdout.split(), os.getuid() != 0"
        )
        assert text_of(await run(at, code)) == "(False, True)"


SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def _addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


@contextlib.contextmanager
def _listeners() -> Iterator[tuple[list[tuple[str, int]], str, Callable[[], int]]]:
    """Servers on every address of this machine, and on an abstract unix name; and how many connections they got."""
    own = [*_addresses(), "::1"]
    with contextlib.ExitStack() as stack:
        servers, addresses = [], []
        for address in own:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = stack.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):
                server.bind((address, 0))
                server.listen()
                server.setblocking(False)
                servers.append(server)
                addresses.append((address, server.getsockname()[1]))
        name = f"toolhost-{os.getpid()}-{secrets.token_hex(4)}"
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(f"\0{name}")
        server.listen()
        server.setblocking(False)
        servers.append(server)

        def accepted() -> int:
            count = 0
            for server in servers:
                with contextlib.suppress(BlockingIOError):
                    server.accept()[0].close()
                    count += 1
            return count

        yield addresses, name, accepted


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
