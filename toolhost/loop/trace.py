"""The trace of a run: every round and every call with its full output, verdicts and times. Never sent to a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from toolhost.loop.errors import LoopError


@dataclass
class Times:
    """Where a run's seconds went. `acceptance` is the time spent judging results."""

    model: float = 0.0
    queue: float = 0.0
    tool: float = 0.0
    acceptance: float = 0.0

    def as_data(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in vars(self).items()}


@dataclass
class Trace:
    """What happened, in order. `entries` are JSON objects with a `kind` each."""

    response_id: str
    principal: str
    model: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    ending: str = ""
    why: str = ""
    calls: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, kind: str, at: float, **fields: Any) -> dict[str, Any]:
        """Append an entry; `at` in seconds since 1970. Returns it, so that later facts can be added."""
        entry: dict[str, Any] = {"kind": kind, "at": round(at, 3), **fields}
        self.entries.append(entry)
        return entry

    def as_data(self) -> dict[str, Any]:
        return {
            "response_id": self.response_id,
            "principal": self.principal,
            "model": self.model,
            "ending": self.ending,
            "why": self.why,
            "times": self.times.as_data(),
            "entries": self.entries,
            "calls": [dict(call) for call in self.calls],
        }


class TraceStore(Protocol):
    """Where traces are kept."""

    def save(self, trace: Trace) -> None: ...

    def load(self, response_id: str) -> dict[str, Any]:
        """The trace as data. Raises LoopError if there is none."""
        ...


class FileTraces:
    """Traces as JSON files in one directory, readable by their owner alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        """Make the directory. Raises OSError."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, trace: Trace) -> None:
        """Write the trace's file. Raises OSError."""
        self.prepare()
        path = self._path(trace.response_id)
        path.touch(mode=0o600)
        # Half of a surrogate pair is written as its JSON escape: whatever happened, its trace can be kept.
        text = json.dumps(trace.as_data(), indent=1, ensure_ascii=False)
        path.write_bytes(text.encode("utf-8", "backslashreplace"))

    def load(self, response_id: str) -> dict[str, Any]:
        path = self._path(response_id)
        if not path.is_file():
            raise LoopError(f"there is no trace of {response_id!r} in {self._directory}")
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data

    def _path(self, response_id: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", response_id):
            raise LoopError(f"{response_id!r} is not a response id")
        return self._directory / f"{response_id}.json"
