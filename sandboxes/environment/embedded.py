"""The embedded environment: a virtual environment in a directory, made to be mounted read-only into a sandbox.

    DIRECTORY/current                      -> generations/N, replaced atomically
    DIRECTORY/generations/N/record.json    what it was made from, and what must be mounted with it
    DIRECTORY/generations/N/tree/          seen inside as /opt/environment: bin/python3, lib, pyvenv.cfg
    DIRECTORY/partial/                     a build under way, or what is left of one that was cut short
    DIRECTORY/lock                         held by a build

The tree's own paths are those inside the sandbox, so it does not run from where it lies. A new build makes a new
generation and removes all but the one before it: sandboxes that run keep the files that they have mounted.

Above: `toolhost setup`, `doctor`, the bubblewrap backend. Below: the other files of this package.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from sandboxes import locks
from sandboxes.environment import wheelhouse
from sandboxes.environment.command import BuildFailed, Report, Step, Steps, run
from sandboxes.environment.interpreter import Interpreter, inspect, preferred
from sandboxes.environment.recipe import list_digest, recipe_directory
from sandboxes.errors import EnvironmentMissing

ENVIRONMENT_INSIDE = PurePosixPath("/opt/environment")
SETUP = "run: toolhost setup"


class Status(enum.StrEnum):
    """Whether what sandboxes run in is there. A stale one works, but was made from another list or recipe."""

    MISSING = "missing"
    STALE = "stale"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host (a directory or a file) and where a sandbox sees it, read-only."""

    source: Path
    target: PurePosixPath


@dataclass(frozen=True, slots=True)
class Environment:
    """What a sandbox must be given, beside the host's system directories (`/usr` and what links into it), read-only.

    `directories`: those to make first, each readable by everybody, outermost first (a mount point's parents that a
    mounting tool makes by itself may be closed to the uid that user code runs as). `python`: the interpreter inside,
    with every package; also fit to run the agent. `search_path`: for PATH inside. `needs`: of the host's files those
    that must still be there, beside what is mounted.
    """

    directories: tuple[PurePosixPath, ...]
    mounts: tuple[Mount, ...]
    python: PurePosixPath
    python_version: str
    search_path: str
    needs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Record:
    digest: str
    python_version: str
    executable: str
    mounts: tuple[tuple[str, str], ...]


def environment_status(directory: Path) -> Status:
    """Whether the environment in `directory` is there and up to date. Reads files only; never raises."""
    try:
        record = _read_record(directory)
        load_environment(directory)
    except EnvironmentMissing:
        return Status.MISSING
    return Status.READY if record.digest == list_digest() else Status.STALE


def load_environment(directory: Path) -> Environment:
    """What to mount, from the newest finished build. Raises EnvironmentMissing, whose message says what to type."""
    record = _read_record(directory)
    tree = (directory / "current").resolve() / "tree"
    mounts = [Mount(tree, ENVIRONMENT_INSIDE)]
    mounts += [Mount(Path(source), PurePosixPath(target)) for source, target in record.mounts]
    needed = [Path(record.executable), *(mount.source for mount in mounts)]
    gone = [path for path in needed if not path.exists()]
    if gone:
        raise EnvironmentMissing(
            f"the sandbox environment in {directory} needs {gone[0]}, which is gone (was Python moved or replaced?): "
            f"{SETUP} --force"
        )
    parents = {parent for mount in mounts for parent in mount.target.parents if parent != PurePosixPath("/")}
    return Environment(
        directories=tuple(sorted(parents, key=lambda path: (len(path.parts), path))),
        mounts=tuple(mounts),
        python=ENVIRONMENT_INSIDE / "bin" / "python3",
        python_version=record.python_version,
        search_path=f"{ENVIRONMENT_INSIDE}/bin:/usr/local/bin:/usr/bin:/bin",
        needs=(Path(record.executable),),
    )


def build_environment(
    directory: Path, *, wheels: Path, report: Report, python: Path | None = None, force: bool = False
) -> bool:
    """Makes the environment in `directory` unless it is ready; says whether it built one.

    `wheels`: where wheelhouses are kept. `python`: the interpreter to build on; None accepts the one that the present
    environment is built on, and else means `preferred`. `force`: build a new one even when it is ready.
    What was there before stays in use until the new one is finished, and for good when this raises.
    Raises BuildFailed, also when another build holds the lock; a KeyboardInterrupt leaves no partial build.
    """
    with build_lock(directory):
        if not force and environment_status(directory) is Status.READY and _is_built_on(directory, python):
            return False
        steps = Steps(report, [Step.INSPECT, Step.DOWNLOAD, Step.INSTALL, Step.COMPILE, Step.VERIFY, Step.PUBLISH])
        partial = directory / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _build(directory, partial, wheels, python or preferred(), steps)
        except OSError as error:
            raise BuildFailed(f"{directory} cannot be written: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return True


def _is_built_on(directory: Path, python: Path | None) -> bool:
    if python is None:
        return True
    return str(inspect(python, lambda line: None).executable) == _read_record(directory).executable


@contextmanager
def build_lock(directory: Path) -> Iterator[None]:
    """Held by the one build that works in `directory`. Raises BuildFailed when another holds it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = locks.take(directory / "lock")
    except locks.Held:
        raise BuildFailed(f"another setup works in {directory}: wait for it to end, then run this again") from None
    except OSError as error:
        raise BuildFailed(f"{directory} cannot be used: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def _build(directory: Path, partial: Path, wheels: Path, python: Path, steps: Steps) -> None:
    tree = partial / "tree"
    requirements = recipe_directory() / "requirements.txt"

    steps.begin(Step.INSPECT)
    interpreter = inspect(python, lambda line: None)
    steps.detail(f"Python {interpreter.full_version}, {interpreter.executable}")
    _make_skeleton(tree, interpreter)
    here = tree / "bin" / "python3"

    steps.begin(Step.DOWNLOAD)
    with build_lock(wheels):
        house = wheelhouse.fill(wheels, interpreter.target, python=here, on_line=steps.detail)

        steps.begin(Step.INSTALL)
        run(
            [
                *wheelhouse.pip_command(),
                *("--python", str(here), "install", "--no-input", "--no-compile", "--no-index"),
                *("--disable-pip-version-check", "--progress-bar=off", "--root-user-action=ignore"),
                *("--find-links", str(house), "-r", str(requirements)),
            ],
            on_line=steps.detail,
            failure=f"the packages could not be installed from {house}: {SETUP} --force (is the disk full?)",
        )

    steps.begin(Step.COMPILE)
    # The paths in the bytecode are those inside, else every import would have to mend them. The packages' own tests
    # are left out: a third of the time, and nobody imports them.
    run(
        [
            *(str(here), "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"),
            *("-x", "/tests/", "-s", str(tree), "-p", str(ENVIRONMENT_INSIDE), str(tree / "lib")),
        ],
        on_line=steps.detail,
        failure="the packages could not be compiled",
    )

    steps.begin(Step.VERIFY)
    run(
        [str(here), "-I", "-B", str(recipe_directory() / "verify.py"), str(requirements)],
        on_line=steps.detail,
        failure="the packages were installed, but not all of them work",
    )

    steps.begin(Step.PUBLISH)
    _seal(tree, interpreter)
    _write_record(partial, interpreter)
    _publish(directory, partial)


def _make_skeleton(tree: Path, interpreter: Interpreter) -> None:
    """A virtual environment as `venv` makes it, without needing that module, which some systems package apart."""
    name = f"python{interpreter.target.version[0]}.{interpreter.target.version[1]}"
    (tree / "lib" / name / "site-packages").mkdir(parents=True)
    (tree / "lib64").symlink_to("lib")
    (tree / "bin").mkdir()
    (tree / "bin" / "python").symlink_to("python3")
    (tree / "bin" / name).symlink_to("python3")
    _point(tree, interpreter.executable, interpreter)
    for made in (tree.parent, tree, *tree.rglob("*")):
        if made.is_dir() and not made.is_symlink():
            made.chmod(0o755)  # whatever this process's umask is: an unprivileged sandbox reads it


def _point(tree: Path, executable: Path | PurePosixPath, interpreter: Interpreter) -> None:
    link = tree / "bin" / "python3"
    link.unlink(missing_ok=True)
    link.symlink_to(executable)
    config = tree / "pyvenv.cfg"
    config.write_text(
        f"home = {executable.parent}\ninclude-system-site-packages = false\nversion = {interpreter.full_version}\n"
    )
    config.chmod(0o644)


def _seal(tree: Path, interpreter: Interpreter) -> None:
    """Turns the host's paths into those inside: the interpreter's, and those in the scripts that packages brought."""
    _point(tree, interpreter.home_inside / interpreter.executable.name, interpreter)
    old, new = f"{tree}/bin/".encode(), f"{ENVIRONMENT_INSIDE}/bin/".encode()
    for script in (tree / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(old, new))


def _write_record(partial: Path, interpreter: Interpreter) -> None:
    record = _Record(
        digest=list_digest(),
        python_version=interpreter.full_version,
        executable=str(interpreter.executable),
        mounts=tuple((str(source), str(target)) for source, target in interpreter.mounts()),
    )
    with (partial / "record.json").open("w") as file:
        json.dump(asdict(record), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_record(directory: Path) -> _Record:
    path = directory / "current" / "record.json"
    try:
        data = json.loads(path.read_text())
        return _Record(
            digest=str(data["digest"]),
            python_version=str(data["python_version"]),
            executable=str(data["executable"]),
            mounts=tuple((str(source), str(target)) for source, target in data["mounts"]),
        )
    except FileNotFoundError:
        raise EnvironmentMissing(f"there is no sandbox environment in {directory}: {SETUP}") from None
    except OSError as error:
        raise EnvironmentMissing(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentMissing(f"{path} is damaged: {SETUP} --force") from error


def _publish(directory: Path, partial: Path) -> None:
    generations = directory / "generations"
    generations.mkdir(exist_ok=True)
    numbers = sorted(int(entry.name) for entry in generations.iterdir() if entry.name.isdigit())
    place = generations / str(numbers[-1] + 1 if numbers else 1)
    partial.rename(place)
    link = directory / "current.new"
    link.unlink(missing_ok=True)
    link.symlink_to(place.relative_to(directory))
    link.rename(directory / "current")
    for number in numbers[:-1]:
        shutil.rmtree(generations / str(number), ignore_errors=True)
