"""The embedded environment: finished or not there, and usable by an unprivileged uid in a real sandbox.

Most tests build from a list of two small packages; one builds the real list and runs it under bubblewrap.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.environment import (
    BuildFailed,
    Environment,
    Progress,
    Status,
    Step,
    build_environment,
    environment_status,
    load_environment,
    recipe,
)
from sandboxes.environment.embedded import build_lock
from sandboxes.environment.interpreter import preferred
from sandboxes.errors import EnvironmentMissing

SMALL_LIST = "tabulate  # import tabulate\npip  # import pip\n"
STEPS = [Step.INSPECT, Step.DOWNLOAD, Step.INSTALL, Step.COMPILE, Step.VERIFY, Step.PUBLISH]
USER = 64123  # an unprivileged uid that no passwd file knows


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture
def small_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "recipe"
    shutil.copytree(recipe.recipe_directory(), place)
    (place / "requirements.txt").write_text(SMALL_LIST)
    monkeypatch.setattr(recipe, "PLACES", (place,))
    return place


@pytest.fixture
def directory(small_list: Path, tmp_path: Path) -> Path:
    return tmp_path / "environment"


@pytest.fixture
def built(directory: Path, wheels: Path) -> Path:
    """A directory with a finished environment of the small list: built once, then copied."""
    first = wheels.with_name(f"{wheels.name}-first")
    if not first.exists():
        build_environment(first, wheels=wheels, report=ignore)
    shutil.copytree(first, directory, symlinks=True)
    return directory


def ignore(progress: Progress) -> None:
    del progress


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def in_sandbox(environment: Environment, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as an unprivileged uid, seeing the system, the environment's mounts and nothing else."""
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--tmpfs", "/tmp", "--perms", "1777", "--tmpfs", "/dev/shm"]
    for name in ("usr", "lib", "lib64", "bin"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    for made in environment.directories:
        command += ["--perms", "0755", "--dir", str(made)]
    for mount in environment.mounts:
        command += ["--ro-bind", str(mount.source), str(mount.target)]
    command += ["--clearenv", "--setenv", "PATH", environment.search_path, "--setenv", "HOME", "/tmp"]
    if os.geteuid() == 0:
        drop = "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); os.execvp(sys.argv[1], sys.argv[1:])"
        command += ["--cap-add", "cap_setuid", "--cap-add", "cap_setgid"]
        command += [str(environment.python), "-I", "-c", drop.format(USER)]
    else:
        command[1:1] = ["--unshare-user"]
    return subprocess.run([*command, *argv], capture_output=True, text=True, timeout=60, check=False)


def test_missing_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    assert environment_status(tmp_path) is Status.MISSING
    with pytest.raises(EnvironmentMissing, match="toolhost setup"):
        load_environment(tmp_path)


def test_build_is_ready_and_a_second_one_does_nothing(directory: Path, wheels: Path) -> None:
    steps: list[Step] = []

    def note(progress: Progress) -> None:
        if not steps or steps[-1] is not progress.step:
            steps.append(progress.step)

    assert build_environment(directory, wheels=wheels, report=note)
    assert steps == STEPS
    assert environment_status(directory) is Status.READY
    assert not (directory / "partial").exists()
    assert not build_environment(directory, wheels=wheels, report=note)


@pytest.mark.bubblewrap
def test_unprivileged_user_runs_it_although_the_builder_keeps_files_to_itself(directory: Path, wheels: Path) -> None:
    with umask(0o077):
        build_environment(directory, wheels=wheels, report=ignore)
    environment = load_environment(directory)
    code = (
        "import json, os, subprocess, sys, tabulate\n"
        "child = subprocess.run([sys.executable, '-c', 'import tabulate; print(1)'], env={}, capture_output=True)\n"
        "compiled = tabulate.tabulate.__code__.co_filename\n"
        "print(json.dumps([tabulate.__file__, compiled, os.getuid(), child.stdout.decode()]))"
    )
    done = in_sandbox(environment, "python3", "-c", code)
    assert done.returncode == 0, done.stderr
    where, compiled_where, uid, child = json.loads(done.stdout)
    assert where.startswith("/opt/environment/lib/")
    assert compiled_where == where, "bytecode names a path of the host: each import would mend it"
    assert uid in (USER, os.geteuid())
    assert child == "1\n", "an interpreter started with an empty environment must find its libraries"


@pytest.mark.bubblewrap
def test_scripts_of_packages_run_inside(built: Path) -> None:
    done = in_sandbox(load_environment(built), "pip", "--version")
    assert "/opt/environment/" in done.stdout, done.stderr


@pytest.mark.bubblewrap
def test_nothing_in_it_can_be_written_from_inside(built: Path) -> None:
    environment = load_environment(built)
    for mount in environment.mounts:
        target = mount.target if mount.source.is_file() else mount.target / "planted"
        done = in_sandbox(environment, "sh", "-c", f": >> {target}")
        assert done.returncode != 0
        assert not (mount.source / "planted").exists()


def test_new_list_makes_it_stale_and_it_still_loads(built: Path, small_list: Path) -> None:
    before = load_environment(built)
    (small_list / "requirements.txt").write_text(SMALL_LIST + "# another list\n")
    assert environment_status(built) is Status.STALE
    assert load_environment(built) == before


def test_new_build_keeps_the_files_of_sandboxes_that_run_and_removes_older_ones(directory: Path, wheels: Path) -> None:
    for _ in range(3):
        build_environment(directory, wheels=wheels, report=ignore, force=True)
    assert sorted(entry.name for entry in (directory / "generations").iterdir()) == ["2", "3"]
    assert load_environment(directory).mounts[0].source == directory / "generations" / "3" / "tree"


@pytest.mark.parametrize("step", STEPS)
def test_interrupt_at_any_step_leaves_no_partial_build_and_the_old_one_in_use(
    built: Path, wheels: Path, step: Step
) -> None:
    before = load_environment(built)
    interrupted = []

    def interrupt(progress: Progress) -> None:
        if progress.step is step:
            interrupted.append(step)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_environment(built, wheels=wheels, report=interrupt, force=True)
    assert interrupted
    assert load_environment(built) == before
    assert environment_status(built) is Status.READY
    assert not (built / "partial").exists()
    build_environment(built, wheels=wheels, report=ignore, force=True)
    assert load_environment(built) != before


def test_package_that_cannot_be_fetched_is_named_and_nothing_is_published(
    directory: Path, tmp_path: Path, small_list: Path
) -> None:
    empty = tmp_path / "empty-index"
    empty.mkdir()
    (small_list / "requirements.txt").write_text(
        f"--no-index\n--find-links {empty}\nno-such-package  # import nothing\n"
    )
    with pytest.raises(BuildFailed, match="could not be fetched") as caught:
        build_environment(directory, wheels=tmp_path / "wheels", report=ignore)
    assert "no-such-package" in caught.value.message
    assert environment_status(directory) is Status.MISSING


def test_package_that_installs_and_does_not_work_is_named(directory: Path, tmp_path: Path, small_list: Path) -> None:
    (small_list / "requirements.txt").write_text("tabulate  # import tabulate.no_such_module\npip  # import pip\n")
    with pytest.raises(BuildFailed, match=r"cannot import tabulate\.no_such_module"):
        build_environment(directory, wheels=tmp_path / "wheels", report=ignore)
    assert environment_status(directory) is Status.MISSING


def test_what_a_killed_build_left_is_removed_by_the_next(directory: Path, wheels: Path) -> None:
    (directory / "partial" / "tree" / "lib").mkdir(parents=True)
    (directory / "partial" / "tree" / "lib" / "half").write_text("half")
    build_environment(directory, wheels=wheels, report=ignore)
    assert not (directory / "partial").exists()
    assert not list(load_environment(directory).mounts[0].source.rglob("half"))


def test_second_build_at_the_same_time_is_refused(directory: Path, wheels: Path) -> None:
    with build_lock(directory), pytest.raises(BuildFailed, match="another setup"):
        build_environment(directory, wheels=wheels, report=ignore)


def test_interpreter_that_was_moved_away_is_named(built: Path) -> None:
    record = built / "current" / "record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"executable": "/gone/python3.11"}))
    assert environment_status(built) is Status.MISSING
    with pytest.raises(EnvironmentMissing, match=r"/gone/python3\.11.*toolhost setup --force"):
        load_environment(built)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"digest": 1, "mounts": 3}', "\0"])
def test_damaged_record_counts_as_missing_and_names_the_mend(built: Path, wheels: Path, text: str) -> None:
    (built / "current" / "record.json").write_text(text)
    assert environment_status(built) is Status.MISSING
    with pytest.raises(EnvironmentMissing, match="toolhost setup --force"):
        load_environment(built)
    assert build_environment(built, wheels=wheels, report=ignore)


def test_directory_that_cannot_be_used_is_named(wheels: Path, small_list: Path) -> None:
    with pytest.raises(BuildFailed, match="/proc/nowhere"):
        build_environment(Path("/proc/nowhere"), wheels=wheels, report=ignore)


def test_another_interpreter_that_was_asked_for_makes_a_new_build(built: Path, wheels: Path) -> None:
    assert not build_environment(built, wheels=wheels, report=ignore, python=preferred())
    record = built / "current" / "record.json"
    other = json.loads(record.read_text()) | {"executable": "/usr/bin/env"}  # some file that exists
    record.write_text(json.dumps(other))
    assert not build_environment(built, wheels=wheels, report=ignore)
    assert build_environment(built, wheels=wheels, report=ignore, python=preferred())


@pytest.mark.bubblewrap
@pytest.mark.timeout(600)
def test_real_list_works_inside_a_sandbox(tmp_path: Path) -> None:
    directory = tmp_path / "environment"
    build_environment(directory, wheels=tmp_path / "wheels", report=ignore)
    environment = load_environment(directory)
    place = recipe.recipe_directory()
    code = (place / "verify.py").read_text().replace("sys.argv[1]", repr("/tmp/list"))
    feed = f"import pathlib; pathlib.Path('/tmp/list').write_text({(place / 'requirements.txt').read_text()!r})\n{code}"
    done = in_sandbox(environment, "python3", "-c", feed)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
