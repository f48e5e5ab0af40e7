"""What a cell gives back: values, output, tracebacks, and the state that persists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .interpreter_process import InterpreterProcess


def check_next_call_works(python: InterpreterProcess) -> None:
    answer = python.run("x + 1")
    assert (answer["outcome"], answer["value"], answer["note"]) == ("ok", "42", None)


def test_ready_frame_names_the_process_and_its_version(python: InterpreterProcess) -> None:
    assert python.ready["pid"] == python.process.pid
    assert python.ready["python"].startswith("3.")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("'text'", "'text'"),
        ("None", None),
        ("", None),
        ("# only a comment", None),
        ("y = 3", None),
        ("1 + 1;", None),
        ("1 + 1 ; # quiet", None),
        ("'a;'", "'a;'"),
        ("'ä' * 2;", None),
        ("y = 1; y", "1"),
        ("1 # no; semicolon", "1"),
        ("if x:\n    5", None),
        ("(1,\n 2)", "(1, 2)"),
        ("x\n\n\n", "41"),
        ("\ufeffx", "41"),
        ("x\r\ny = 2\r\ny\r\n", "2"),
        ("'\\ud800'", "'\\ud800'"),
        ("await __import__('asyncio').sleep(0, 'slept')", "'slept'"),
        ("[await __import__('asyncio').sleep(0, i) for i in range(2)]", "[0, 1]"),
    ],
)
def test_value_of_the_last_expression_is_shown(python: InterpreterProcess, code: str, value: str | None) -> None:
    answer = python.run(code)
    assert (answer["outcome"], answer["value"], answer["output"]) == ("ok", value, "")


def test_last_value_is_underscore(python: InterpreterProcess) -> None:
    python.run("[1, 2]")
    assert python.run("sum(_)")["value"] == "3"


def test_variables_imports_functions_and_directory_persist(python: InterpreterProcess) -> None:
    python.run("import os, math\nos.mkdir('sub')\nos.chdir('sub')\ndef double(n):\n    return n * factor")
    python.run("factor = 2")
    answer = python.run("double(x), math.pi > 3, os.path.basename(os.getcwd())")
    assert answer["value"] == "(82, True, 'sub')"


def test_future_import_holds_for_later_cells(python: InterpreterProcess) -> None:
    python.run("from __future__ import annotations")
    assert python.run("def f(a: undefined): pass\nf.__annotations__")["value"] == "{'a': 'undefined'}"


def test_module_in_the_working_directory_can_be_imported(python: InterpreterProcess) -> None:
    (python.directory / "mine.py").write_text("answer = 42")
    assert python.run("import mine\nmine.answer")["value"] == "42"


def test_package_in_the_site_directory_can_be_imported(python: InterpreterProcess) -> None:
    python.site.mkdir()
    (python.site / "installed.py").write_text("answer = 42")
    assert python.run("import installed\ninstalled.answer")["value"] == "42"


def test_modules_named_at_start_are_imported_before_the_first_cell(tmp_path: Path) -> None:
    with InterpreterProcess(tmp_path, modules=("decimal", "no_such_module")) as python:
        assert python.run("import sys; 'decimal' in sys.modules")["value"] == "True"


def test_own_main_module_pickles_dataclasses_and_functions(python: InterpreterProcess) -> None:
    code = """import pickle, dataclasses, sys
@dataclasses.dataclass
class Point:
    a: int
def double(n): return 2 * n
copy, function = pickle.loads(pickle.dumps((Point(3), double)))
copy, function(4), sys.modules['__main__'].x, __name__"""
    assert python.run(code)["value"] == "(Point(a=3), 8, 41, '__main__')"


def test_no_name_of_the_engine_is_in_the_namespace(python: InterpreterProcess) -> None:
    names = "['__builtins__', '__doc__', '__loader__', '__name__', '__package__', '__spec__', 'x']"
    assert python.run("dir()")["value"] == names
    assert "NameError: name '__file__' is not defined" in python.run("__file__")["error"]


def test_output_of_subprocesses_and_prints_is_in_order_with_the_tail(python: InterpreterProcess) -> None:
    code = """import os, subprocess, sys
for i in range(50):
    print(i, 'out')
    print(i, 'err', file=sys.stderr)
    os.system(f'echo {i} sh')
    os.write(1, f'{i} raw\\n'.encode())
subprocess.run(['echo', 'last'])
print('tail', end='')"""
    lines = [f"{i} {kind}" for i in range(50) for kind in ("out", "err", "sh", "raw")]
    assert python.run(code)["output"] == "\n".join([*lines, "last", "tail"])


def test_hundred_and_fifty_thousand_characters_arrive_whole(python: InterpreterProcess) -> None:
    assert python.run("print('x' * 150_000)")["output"] == "x" * 150_000 + "\n"


def test_threads_printing_at_once_do_not_tear_lines(python: InterpreterProcess) -> None:
    code = """import threading
def work(n):
    for i in range(200):
        print('thread', n, i)
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()"""
    lines = python.run(code)["output"].splitlines()
    assert sorted(lines) == sorted(f"thread {n} {i}" for n in range(8) for i in range(200))


def test_thread_that_prints_after_its_cell_is_heard(python: InterpreterProcess) -> None:
    code = """import threading
go = threading.Event()
def late():
    go.wait()
    print('late')
threading.Thread(target=late).start()"""
    assert python.run(code)["output"] == ""
    python.send("go.set()")
    assert "late" in python.output_until("late\n")


def test_input_raises_eof_at_once(python: InterpreterProcess) -> None:
    answer = python.run("input('name? ')")
    assert answer["outcome"] == "raised"
    assert answer["error"].endswith("EOFError: EOF when reading a line")
    check_next_call_works(python)


def test_traceback_shows_lines_of_earlier_cells_and_nothing_of_ours(python: InterpreterProcess) -> None:
    python.run("def inner(n):\n    return 1 / n")
    error = python.run("def outer():\n    inner(0)\nouter()")["error"]
    assert error.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "<cell 3>", line 3, in <module>\n    outer()' in error
    assert 'File "<cell 3>", line 2, in outer\n    inner(0)' in error
    assert 'File "<cell 2>", line 2, in inner\n    return 1 / n' in error
    assert error.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "agent" not in error


def test_traceback_printed_by_user_code_shows_the_lines(python: InterpreterProcess) -> None:
    code = "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()"
    output = python.run(code)["output"]
    assert 'File "<cell 2>", line 3, in <module>\n    1 / 0' in output
    assert "agent" not in output


def test_source_of_a_function_can_be_inspected(python: InterpreterProcess) -> None:
    python.run("def f():\n    return 1")
    assert python.run("import inspect\nprint(inspect.getsource(f))")["output"] == "def f():\n    return 1\n\n"


@pytest.mark.parametrize(
    ("code", "line"),
    [("a = 1\nx = = 1", "x = = 1"), ("\nreturn 5", "return 5"), ("def f(:", "def f(:"), ("print 1", "print 1")],
)
def test_syntax_error_shows_the_line_and_a_caret(python: InterpreterProcess, code: str, line: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "raised"
    assert f"\n    {line}\n" in answer["error"]
    assert "^" in answer["error"]
    assert "SyntaxError" in answer["error"].splitlines()[-1]
    assert "Traceback" not in answer["error"]
    check_next_call_works(python)


@pytest.mark.parametrize(
    "code", ["x = 1\0", "(" * 5000, "-" * 100_000 + "1", "if 1:\nx", "\tx\n  x", "'" + "a" * 30_000, "'\ud800'"]
)
def test_code_that_cannot_be_compiled_raises_and_loses_nothing(python: InterpreterProcess, code: str) -> None:
    answer = python.run(code)
    assert answer["outcome"] == "raised"
    assert len(answer["error"]) < 22_000
    check_next_call_works(python)


def test_chained_exceptions_and_notes_are_shown(python: InterpreterProcess) -> None:
    code = """try:
    1 / 0
except ZeroDivisionError as cause:
    error = ValueError('bad')
    error.add_note('a note')
    raise error from cause"""
    error = python.run(code)["error"]
    assert "direct cause" in error
    assert error.index("ZeroDivisionError") < error.index("ValueError: bad\na note")


def test_exception_group_shows_each_member(python: InterpreterProcess) -> None:
    error = python.run("raise ExceptionGroup('several', [ValueError('one'), KeyError('two')])")["error"]
    assert "several (2 sub-exceptions)" in error
    assert "ValueError: one" in error
    assert "KeyError: 'two'" in error


def test_warning_names_the_cells_line_each_time(python: InterpreterProcess) -> None:
    for number in (2, 3):
        output = python.run("import warnings\nwarnings.warn('old')")["output"]
        assert output == f"<cell {number}>:2: UserWarning: old\n  warnings.warn('old')\n"


def test_deprecation_warning_of_the_cells_own_call_is_shown(python: InterpreterProcess) -> None:
    output = python.run("import warnings\nwarnings.warn('gone soon', DeprecationWarning)")["output"]
    assert "DeprecationWarning: gone soon" in output


def test_deep_recursion_is_shown_collapsed(python: InterpreterProcess) -> None:
    error = python.run("def f(): return f()\nf()")["error"]
    assert "RecursionError" in error
    assert "Previous line repeated" in error
    assert len(error) < 2000
    check_next_call_works(python)


def test_traceback_of_mutual_recursion_is_capped_at_both_ends(python: InterpreterProcess) -> None:
    code = "import sys\nsys.setrecursionlimit(50_000)\ndef f(n): return g(n)\ndef g(n): return f(n)\nf(1)"
    error = python.run(code, cap=5000)["error"]
    assert error.startswith("Traceback")
    assert "characters cut" in error
    assert "RecursionError" in error
    assert len(error) < 5200
    check_next_call_works(python)


def test_long_value_keeps_head_and_tail_and_the_count(python: InterpreterProcess) -> None:
    code = "class Long:\n    def __repr__(self): return 'h' * 600 + 't' * 600\nLong()"
    value = python.run(code, cap=1000)["value"]
    assert value == "h" * 500 + "\n... [200 characters cut] ...\n" + "t" * 500


@pytest.mark.parametrize(
    ("code", "total"),
    [
        ("[7] * 10**7", "10,000,000 items"),
        ("(7,) * 10**7", "10,000,000 items"),
        ("'z' * 10**8", "100,000,000 characters"),
        ("b'z' * 10**8", "100,000,000 bytes"),
        ("bytearray(10**8)", "100,000,000 bytes"),
        ("set(range(10**6))", "1,000,000 items"),
        ("dict.fromkeys(range(10**6))", "1,000,000 items"),
    ],
)
def test_huge_builtin_value_is_shown_in_part_with_its_size(python: InterpreterProcess, code: str, total: str) -> None:
    value = python.run(code, cap=1000)["value"]
    assert total in value
    assert len(value) < 1200


def test_task_made_in_one_cell_is_awaited_in_the_next(python: InterpreterProcess) -> None:
    python.run("import asyncio\nasync def work():\n    await asyncio.sleep(0)\n    return 'worked'")
    assert python.run("task = asyncio.create_task(work())")["outcome"] == "ok"
    assert python.run("await task")["value"] == "'worked'"


def test_task_goes_on_between_cells(python: InterpreterProcess) -> None:
    code = """import asyncio
async def work():
    await asyncio.sleep(0.05)
    print('worked')
task = asyncio.create_task(work())
await asyncio.sleep(0)"""
    assert python.run(code)["output"] == ""
    assert python.output_until("worked\n") == "worked\n"
    assert python.run("task.done()")["value"] == "True"


def test_asyncio_run_works_before_and_after_an_await(python: InterpreterProcess) -> None:
    python.run("import asyncio\nasync def work(): return 'worked'")
    assert python.run("asyncio.run(work())")["value"] == "'worked'"
    assert python.run("await work()")["value"] == "'worked'"
    assert python.run("asyncio.run(work())")["value"] == "'worked'"
    assert python.run("await work()")["value"] == "'worked'"


def test_background_task_that_raises_harms_no_later_cell(python: InterpreterProcess) -> None:
    code = "import asyncio\nasync def bad():\n    raise SystemExit(3)\ntask = asyncio.create_task(bad())\n0"
    python.run(code)
    check_next_call_works(python)


def test_closed_event_loop_is_replaced(python: InterpreterProcess) -> None:
    python.run("import asyncio\nawait asyncio.sleep(0)\nloop = asyncio.get_running_loop()")
    assert python.run("loop.close()")["outcome"] == "ok"
    assert python.run("await asyncio.sleep(0, 'again')")["value"] == "'again'"


def test_channel_that_closes_ends_the_process(tmp_path: Path) -> None:
    with InterpreterProcess(tmp_path) as python:
        python.close_channel()
        assert python.process.wait(30) == 70


def test_subprocess_does_not_inherit_the_channel(python: InterpreterProcess) -> None:
    code = (
        "import subprocess\nprint(subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True).stdout)"
    )
    output = python.run(code)["output"]
    assert "socket" not in output
    assert "->" in output


def test_descriptors_from_three_upwards_can_be_closed(python: InterpreterProcess) -> None:
    assert (
        python.run(f"import os\nos.closerange(3, 256)\nos.open('/dev/null', 0) < {os.sysconf('SC_OPEN_MAX')}")[
            "outcome"
        ]
        == "ok"
    )
    check_next_call_works(python)
