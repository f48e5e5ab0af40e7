"""Code that damages what it shares with the engine: one defined result each, and the next cell works."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .interpreter_process import Died, InterpreterProcess


def check_next_call_works(python: InterpreterProcess) -> None:
    answer = python.run("print('heard'); x + 1")
    assert (answer["outcome"], answer["value"]) == ("ok", "42")
    assert "heard\n" in answer["output"]


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import sys; sys.exit()", "sys.exit()"),
        ("import sys; sys.exit(3)", "sys.exit(3)"),
        ("import sys; sys.exit('fatal: no')", "sys.exit(fatal: no)"),
        ("exit()", "sys.exit()"),
        ("quit(0)", "sys.exit(0)"),
        ("raise SystemExit", "sys.exit()"),
        ("import asyncio\nawait asyncio.sleep(0)\nraise SystemExit(4)", "sys.exit(4)"),
        ("class Bad:\n    def __str__(self): 1/0\nraise SystemExit(Bad())", "sys.exit(Bad)"),
    ],
)
def test_exit_ends_the_cell_says_so_and_keeps_variables(python: InterpreterProcess, code: str, note: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "exited"
    assert note in answer["note"]
    assert "variables are kept" in answer["note"]
    check_next_call_works(python)


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise StopIteration(1)", "StopIteration: 1"),
        ("class Bad(Exception):\n    def __str__(self): raise self\nraise Bad", "<exception str() failed>"),
        ("class Bad(Exception):\n    def __getattribute__(self, name): raise ValueError(name)\nraise Bad", "Bad"),
        ("class R:\n    def __repr__(self): raise ValueError('no repr')\nR()", "ValueError: no repr"),
        ("class R:\n    def __repr__(self): return 5\nR()", "TypeError: __repr__ returned non-string (type int)"),
        ("class R:\n    def __repr__(self): raise SystemError\nR()", "SystemError"),
        ("10 ** 5000", "set_int_max_str_digits"),
    ],
)
def test_odd_exceptions_and_reprs_are_raised_results(python: InterpreterProcess, code: str, last: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "raised"
    assert last in answer["error"].splitlines()[-1]
    assert answer["value"] is None
    check_next_call_works(python)


def test_repr_that_prints_is_heard_and_shown(python: InterpreterProcess) -> None:
    answer = python.run("class R:\n    def __repr__(self):\n        print('printed')\n        return 'shown'\nR()")
    assert (answer["output"], answer["value"]) == ("printed\n", "shown")


def test_huge_repr_is_cut(python: InterpreterProcess) -> None:
    value = python.run("class R:\n    def __repr__(self): return 'r' * 50_000_000\nR()")["value"]
    assert "49,980,000 characters cut" in value


def test_repr_that_is_a_hostile_str_is_shown_plain(python: InterpreterProcess) -> None:
    code = """class S(str):
    def encode(self, *a): raise ValueError
    def __len__(self): return -1
    __str__ = __getitem__ = __format__ = None
class R:
    def __repr__(self): return S('text')
R()"""
    assert python.run(code)["value"] == "text"
    check_next_call_works(python)


def test_object_that_claims_every_attribute_is_shown_by_its_repr(python: InterpreterProcess) -> None:
    code = "from unittest.mock import MagicMock\nMagicMock(name='m')"
    assert python.run(code)["value"].startswith("<MagicMock name='m'")


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.close(1)",
        "import os\nos.close(2)\nos.close(1)\nos.close(0)",
        "import os\nos.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
        "import os, stat\nfor fd in map(int, os.listdir('/proc/self/fd')):\n"  # the channel in a stream's place
        "    if os.path.exists(f'/proc/self/fd/{fd}') and stat.S_ISSOCK(os.fstat(fd).st_mode): os.dup2(fd, 2)",
        "import os\nos.closerange(0, 256)",
        "import sys\nsys.stdout.close()\nsys.stderr.close()",
        "import sys\nsys.stdout = None\nsys.stderr = 5",
        "import sys, io\nsys.stdout = io.StringIO()",
        "import sys\ndel sys.stdout, sys.stderr, sys.stdin",
        "import sys\nsys.stdout.detach()",
        "import sys\nsys.stdin.close()\nsys.stdout.buffer.close()",
        "import sys\nclass Bad:\n    closed = False\n    def flush(self): raise SystemExit\nsys.stdout = Bad()",
    ],
)
def test_streams_are_put_back_and_the_note_says_so(python: InterpreterProcess, code: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "ok"
    assert "standard streams" in answer["note"]
    check_next_call_works(python)


def test_pipe_that_was_made_non_blocking_still_takes_everything(python: InterpreterProcess) -> None:
    answer = python.run("import os\nos.set_blocking(1, False)\nprint('x' * 1_000_000)")
    assert (answer["outcome"], len(answer["output"])) == ("ok", 1_000_001)


def test_text_left_in_a_replaced_stdout_over_the_pipe_is_delivered(python: InterpreterProcess) -> None:
    answer = python.run(
        "import sys, io\nsys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, 'w')))\nprint('kept')"
    )
    assert answer["output"] == "kept\n"
    check_next_call_works(python)


DAMAGE = [
    "print = len = repr = compile = None",
    "del __builtins__",
    "__builtins__ = {}",
    "__builtins__ = None",
    "import builtins\nbuiltins.compile = builtins.eval = builtins.exec = builtins.repr = None",
    "import builtins\nbuiltins.__dict__.clear()",
    "import builtins\nbuiltins.__import__ = None\nbuiltins.isinstance = lambda *a: 1/0",
    "import json, os, sys\njson.dumps = json.loads = os.write = os.read = os.fstat = None",
    "import sys\nsys.modules.clear()",
    "import sys\nsys.modules = {}",
    "import sys\nsys.modules['__main__'] = None\ndel sys.modules['sys'], sys.modules['os']",
    "import sys\nsys.path = None",
    "import sys\nsys.path.clear()\nsys.meta_path.clear()\nsys.path_hooks.clear()",
    "import sys\nsys.setrecursionlimit(60)",
    "import sys\nsys.setprofile(lambda *a: None)",
    "import threading\nthreading.setprofile(lambda *a: 1/0)\nthreading.settrace(lambda *a: 1/0)",
    "import gc\ngc.disable()",
    "import sys\nsys.excepthook = sys.unraisablehook = None",
    "import sys\nsys.displayhook = None",
    "import linecache, traceback\nlinecache.cache = None\ntraceback.TracebackException = None",
    "import linecache\nlinecache.clearcache()",
    "import atexit, os\natexit.register(os._exit, 9)",
    "globals().clear(); x = 41",
    "from signal import *\nfor n in (SIGTERM, SIGUSR1, SIGCHLD, SIGPIPE): signal(n, SIG_IGN)",
    "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "import os\nos.environ.clear()",
    "import locale, os\nos.chdir('/')",
    "import warnings\nwarnings.simplefilter('error')",
    "import time\ntime.sleep = time.time = None",
    "import os\nos.umask(0o777)",
]


@pytest.mark.parametrize("code", DAMAGE)
def test_damage_is_contained(python: InterpreterProcess, code: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "ok", answer
    if code.startswith("print ="):
        python.run("del print, len, repr, compile")
    check_next_call_works(python)
    answer = python.run("def f():\n    1 / 0\nf()")
    assert answer["outcome"] == "raised"
    assert "ZeroDivisionError: division by zero" in answer["error"]
    check_next_call_works(python)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(DAMAGE[1:]), min_size=2, max_size=6))
def test_damage_upon_damage_leaves_every_cell_answered_and_the_next_one_working(codes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory, InterpreterProcess(Path(directory)) as python:
        python.run("x = 41")
        for code in codes:
            assert python.run(code)["outcome"] in ("ok", "raised", "exited")
        python.run("x = 41")
        check_next_call_works(python)


def test_tracebacks_are_whole_after_builtins_were_emptied_in_the_first_cell(tmp_path: Path) -> None:
    with InterpreterProcess(tmp_path) as python:
        python.run("import builtins\nbuiltins.compile = None\nvars(builtins).pop('isinstance')")
        assert "line 1, in <module>\n    1 / 0" in python.run("1 / 0")["error"]


def test_a_users_print_stays(python: InterpreterProcess) -> None:
    python.run("import builtins\nold = print\nbuiltins.print = lambda *a: old('mine', *a)")
    assert python.run("print(1)")["output"] == "mine 1\n"


def test_trace_function_that_raises_ends_the_next_cell_and_is_gone_then(python: InterpreterProcess) -> None:
    assert python.run("import sys\nsys.settrace(lambda *a: 1/0)")["outcome"] == "ok"
    assert python.run("x")["error"].endswith("ZeroDivisionError: division by zero")
    check_next_call_works(python)


def test_trace_function_sees_later_cells_and_only_their_code(python: InterpreterProcess) -> None:
    python.run("import sys\nseen = set()\nsys.settrace(lambda frame, *a: seen.add(frame.f_code.co_filename))")
    python.run("def f(): pass\nf()")
    assert python.run("sys.settrace(None)\nsorted(name for name in seen if 'cell' in name or 'agent' in name)")[
        "value"
    ] in (
        "['<cell 3>', '<cell 4>']",
        "['<cell 3>']",
    )


def test_displayhook_of_the_users_own_is_used(python: InterpreterProcess) -> None:
    python.run("import sys\nsys.displayhook = lambda value: print('hook', value)")
    answer = python.run("x")
    assert (answer["value"], answer["output"]) == (None, "hook 41\n")


def test_modules_of_the_users_own_with_our_modules_names_change_nothing(python: InterpreterProcess) -> None:
    for name in ("traceback", "linecache", "base64", "asyncio", "re", "subprocess"):
        (python.directory / f"{name}.py").write_text("raise RuntimeError('not this one')")
    assert "1 / 0\n" in python.run("1 / 0")["error"]
    check_next_call_works(python)


def test_a_traceback_module_of_the_users_own_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "traceback.py").write_text("mine = True")
    with InterpreterProcess(tmp_path) as python:
        python.run("import traceback\ntraceback.mine")
        assert "line 1, in <module>\n    1 / 0" in python.run("1 / 0")["error"]
        assert python.run("traceback.mine")["value"] == "True"


def test_removed_working_directory_is_left_and_the_note_says_so(python: InterpreterProcess) -> None:
    python.run("import os, shutil\nos.mkdir('gone')\nos.chdir('gone')\nshutil.rmtree(os.getcwd())")
    answer = python.run("import os; os.getcwd()")
    assert answer["value"] == repr(str(python.directory))
    assert "working directory" in answer["note"]


def test_forked_child_that_falls_out_of_the_cell_never_answers_or_shows_a_value(python: InterpreterProcess) -> None:
    code = """import os
child = os.fork()
if child == 0:
    print('child')
else:
    status = os.waitpid(child, 0)[1]
os.getpid()"""
    answer = python.run(code)
    assert answer["output"] == "child\n"
    assert answer["value"] == str(python.process.pid)
    assert python.run("status")["value"] == "0"
    check_next_call_works(python)


@pytest.mark.parametrize("first", ["", "import asyncio\nawait asyncio.sleep(0)\n"])
def test_forked_child_runs_the_cell_to_its_last_line_and_shows_what_it_raised(
    python: InterpreterProcess, first: str
) -> None:
    code = (
        first
        + "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\n{'parent': 7}['parent' if child else 'child']"
    )
    answer = python.run(code)
    assert (answer["outcome"], answer["value"]) == ("ok", "7")
    assert answer["output"].endswith("KeyError: 'child'\n")
    assert f"line {code.count(chr(10)) + 1}, in <module>" in answer["output"]
    answer = python.run(
        first + "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\nprint('child', child == 0)"
    )
    assert answer["output"] == "child True\nchild False\n"
    check_next_call_works(python)


@pytest.mark.parametrize(
    ("end", "status"), [("1 / 0", 1), ("raise SystemExit(7)", 7), ("raise SystemExit", 0), ("await_ = 1", 0)]
)
def test_forked_childs_exit_status_tells_how_it_ended(python: InterpreterProcess, end: str, status: int) -> None:
    code = f"import os\nif (child := os.fork()) == 0:\n    {end}\nelse:\n    ended = os.waitpid(child, 0)[1]"
    answer = python.run(code)
    assert answer["outcome"] == "ok"
    assert python.run("os.waitstatus_to_exitcode(ended)")["value"] == str(status)


def test_fork_in_an_awaiting_cell_and_in_a_thread_answers_once(python: InterpreterProcess) -> None:
    code = """import asyncio, os, threading
await asyncio.sleep(0)
if os.fork() == 0:
    await asyncio.sleep(0)
def work():
    if os.fork() == 0:
        os._exit(0)
thread = threading.Thread(target=work)
thread.start()
thread.join()"""
    assert python.run(code)["outcome"] == "ok"
    check_next_call_works(python)


def test_fork_without_waiting_leaves_the_session_working(python: InterpreterProcess) -> None:
    python.run("import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    print('late child')")
    check_next_call_works(python)
    python.output_until("late child")
    check_next_call_works(python)


def test_long_lived_child_does_not_hold_the_channel_open(python: InterpreterProcess) -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nos._exit(5)"
    with pytest.raises(Died) as died:
        python.run(code)
    assert died.value.args[0] == 5


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(3)", 3),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.execv('/bin/true', ['true'])", 0),
        ("import os; os.closerange(3, 5000)", 70),
    ],
)
def test_death_in_a_cell_closes_the_channel_after_the_output(
    python: InterpreterProcess, code: str, status: int
) -> None:
    with pytest.raises(Died) as died:
        python.run(f"print('before')\n{code}")
    assert died.value.args[0] == status
    assert python.output() == "before\n"


def test_memory_limit_raises_and_the_next_cell_works(python: InterpreterProcess) -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (512 << 20, -1))\ny = bytearray(4 << 30)"
    assert python.run(code)["error"].endswith("MemoryError")
    check_next_call_works(python)


def test_multiprocessing_by_fork_uses_functions_of_the_cells(python: InterpreterProcess) -> None:
    code = """import multiprocessing
def double(n): return 2 * n
with multiprocessing.get_context('fork').Pool(2) as pool:
    results = pool.map(double, range(4))
results"""
    assert python.run(code)["value"] == "[0, 2, 4, 6]"
    check_next_call_works(python)


def test_multiprocessing_by_spawn_uses_functions_of_modules(python: InterpreterProcess) -> None:
    code = """import multiprocessing, operator
with multiprocessing.get_context('spawn').Pool(1) as pool:
    results = pool.map(operator.neg, range(4))
results"""
    assert python.run(code)["value"] == "[0, -1, -2, -3]"
    check_next_call_works(python)


def test_text_in_the_buffers_of_c_code_is_delivered_with_its_cell(python: InterpreterProcess) -> None:
    assert python.run("import ctypes\nctypes.CDLL(None).printf(b'from C')")["output"] == "from C"


def test_images_asked_for_where_nothing_can_be_written_are_a_note(python: InterpreterProcess) -> None:
    code = "class P:\n    def _repr_png_(self): return b'png'\nP()"
    answer = python.run(code, outputs=Path("/proc/nowhere"))
    assert answer["outcome"] == "ok"
    assert answer["images"] == []
    assert "1 image was not saved" in answer["note"]
    check_next_call_works(python)


def test_image_method_that_raises_is_a_note_and_the_text_is_shown(python: InterpreterProcess) -> None:
    answer = python.run("class P:\n    def _repr_png_(self): return 1 / 0\n    def __repr__(self): return 'shown'\nP()")
    assert (answer["outcome"], answer["value"]) == ("ok", "shown")
    assert "ZeroDivisionError" in answer["note"]


def test_image_can_be_read_whatever_umask_the_code_set(python: InterpreterProcess) -> None:
    answer = python.run("import os\nos.umask(0o777)\nclass P:\n    def _repr_png_(self): return b'png'\nP()")
    path = Path(answer["images"][0]["path"])
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_error_between_cells_is_reported_with_stderr_gone(python: InterpreterProcess) -> None:
    code = """import signal, sys
def on_alarm(number, frame):
    raise TimeoutError('too late')
signal.signal(signal.SIGALRM, on_alarm)
sys.stderr = sys.__stderr__ = None
signal.setitimer(signal.ITIMER_REAL, 0.05)"""
    python.run(code)
    assert "TimeoutError: too late" in python.output_until("too late\n")
    check_next_call_works(python)


def test_full_disk_skips_the_image_and_leaves_no_part_of_it(python: InterpreterProcess) -> None:
    code = """import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
class P:
    def _repr_png_(self): return b'p' * 5000
P()"""
    answer = python.run(code)
    assert "1 image was not saved" in answer["note"]
    assert list(python.outputs.iterdir()) == []


def test_link_planted_at_an_images_path_is_not_followed(python: InterpreterProcess) -> None:
    target = python.directory / "precious"
    target.write_text("kept")
    python.outputs.mkdir()
    os.symlink(target, python.outputs / "figure-2-1.png")
    answer = python.run("class P:\n    def _repr_png_(self): return b'png'\nP()")
    assert [Path(image["path"]).read_bytes() for image in answer["images"]] == [b"png"]
    assert target.read_text() == "kept"


def test_without_ipython_a_cell_that_needs_it_says_so_and_loses_nothing(python: InterpreterProcess) -> None:
    python.run("import sys\nsys.modules['IPython'] = None")
    for code in ("!ls", "%timeit x", "x?", "%%bash\nls", "y = 5\ndisplay(x)", "y = 5\nget_ipython()"):
        answer = python.run(code)
        assert answer["outcome"] == "raised"
        assert "IPython is not installed" in answer["error"]
        assert "Nothing of this cell was run" in answer["error"]
    assert python.run("'y' in globals()")["value"] == "False"
    check_next_call_works(python)


def test_strings_and_own_names_never_need_ipython(python: InterpreterProcess) -> None:
    python.run("import sys\nsys.modules['IPython'] = None")
    for code in (
        "s = '''\n%timeit x\n!ls\nx?\n'''\ns",
        "'display(x)'",
        "def display(value): return value\ndisplay(x)",
        "display(x)",
        "# display(x)",
        "x %x",
    ):
        assert python.run(code)["outcome"] == "ok", code
    assert "SyntaxError" in python.run("text = '''\n%time\n'''\nx = = 1")["error"]


def wait_until_zombie(pid: int) -> None:
    while ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        os.sched_yield()


def test_children_that_the_supervisor_killed_are_reaped(python: InterpreterProcess) -> None:
    started = python.run("import subprocess; p = subprocess.Popen(['sleep', '1000']); p.pid")
    pid = int(started["value"])
    os.kill(pid, signal.SIGKILL)
    wait_until_zombie(pid)
    python.reap([pid, 1])
    check_next_call_works(python)
    assert not Path(f"/proc/{pid}").exists(), "a zombie would count against the process limit"
