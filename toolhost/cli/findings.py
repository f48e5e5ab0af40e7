"""What `toolhost doctor` finds. Above: `doctor` and its parts. Below: nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `grade`: "ok", "weak" (it works, but) or "wrong" (the host cannot do its work)."""

    check: str
    grade: str
    what: str
    mend: str = ""
