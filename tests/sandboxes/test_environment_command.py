"""A build's commands: their output, their failures, and that nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sandboxes.environment.command import BuildFailed, Progress, Step, Steps, run


def ignore(line: str) -> None:
    del line


def test_output_is_returned_and_reported_line_by_line() -> None:
    lines: list[str] = []
    text = run([sys.executable, "-c", "print('a'); print(); print('b')"], on_line=lines.append, failure="no")
    assert text == "a\n\nb\n"
    assert lines == ["a\n", "b\n"]


def test_failure_says_what_failed_with_the_exit_code_and_the_last_lines() -> None:
    code = "import sys\nfor n in range(100): print('line', n)\nsys.exit(3)"
    with pytest.raises(BuildFailed) as caught:
        run([sys.executable, "-c", code], on_line=ignore, failure="the thing failed")
    assert caught.value.message.startswith("the thing failed (exit code 3)")
    assert "line 99" in caught.value.message
    assert "line 84" not in caught.value.message


def test_undecodable_output_is_shown_and_breaks_nothing() -> None:
    assert run([sys.executable, "-c", r"import os; os.write(1, b'\xff\xfe!')"], on_line=ignore, failure="no").endswith(
        "!"
    )


def test_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(BuildFailed, match=r"no-such-program"):
        run(["/no-such-program"], on_line=ignore, failure="the thing failed")


def test_interrupt_ends_the_command_and_its_children() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    children: list[psutil.Process] = []

    def interrupt(line: str) -> None:
        child = psutil.Process(int(line))
        children.extend([child, child.parent() or child])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", code], on_line=interrupt, failure="no")
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert len(gone) == 2
    assert not alive


def test_the_command_and_its_children_end_with_a_caller_that_was_killed() -> None:
    command = (
        "import subprocess, sys, time\nsubprocess.Popen(['sleep', '600'])\nprint('runs', flush=True)\ntime.sleep(600)"
    )
    code = (
        "import sys\nfrom sandboxes.environment.command import run\n"
        f"run([sys.executable, '-c', {command!r}], on_line=lambda line: print(line, flush=True), failure='no')"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "runs\n"
    below = psutil.Process(caller.pid).children(recursive=True)
    assert {"sleep", Path(sys.executable).resolve().name} <= {Path(one.exe()).name for one in below}
    caller.kill()
    caller.communicate()
    _, alive = psutil.wait_procs(below, timeout=30)
    for one in alive:
        one.kill()
    assert not alive


def test_nothing_waits_for_a_command_that_has_ended() -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    assert run(["/bin/cat"], on_line=ignore, failure="no") == ""
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


def test_variables_that_mislead_a_build_do_not_reach_it_and_the_index_settings_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    names = "'PYTHONPATH', 'PIP_TARGET', 'PIP_INDEX_URL'"
    text = run(
        [sys.executable, "-c", f"import os; print([os.environ.get(n) for n in ({names})])"],
        on_line=ignore,
        failure="no",
    )
    assert text.strip() == "[None, None, 'https://index.example/simple']"


def test_files_of_a_command_are_readable_by_all_whatever_the_callers_umask(tmp_path: Path) -> None:
    made = tmp_path / "made"
    run(["sh", "-c", f"umask; : > {made}"], on_line=ignore, failure="no")
    assert made.stat().st_mode & 0o777 == 0o644


def test_steps_are_numbered_in_reports() -> None:
    seen: list[Progress] = []
    steps = Steps(seen.append, [Step.INSPECT, Step.DOWNLOAD])
    steps.begin(Step.DOWNLOAD)
    steps.detail(" Collecting x\n")
    assert seen == [Progress(Step.DOWNLOAD, 2, 2), Progress(Step.DOWNLOAD, 2, 2, "Collecting x")]
