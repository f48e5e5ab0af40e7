"""What has run and what will: every attempt by its id, until the host says that its ledger has it.

Above: `executions`. Below: nothing. Nothing runs twice: a known id is never accepted again, a forgotten one neither
as long as it is remembered that it was forgotten.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .run import Run

# Results that no ledger has confirmed: the host must fetch them before it may ask for more.
MAX_KEPT = 512
MAX_KEPT_BYTES = 64 << 20
_MAX_FORGOTTEN = 4096


class Attempts:
    """Runs by attempt id, and the lines of the results (without an id) of those that have ended."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}  # all that are not forgotten
        self._results: dict[str, bytes] = {}
        self._bytes = 0
        self._forgotten: dict[str, None] = {}

    def find(self, attempt: str) -> Run | None:
        return self.runs.get(attempt)

    def result(self, attempt: str) -> bytes | None:
        return self._results.get(attempt)

    def forgotten(self, attempt: str) -> bool:
        """Its result was acknowledged."""
        return attempt in self._forgotten

    @property
    def full(self) -> bool:
        return len(self.runs) >= MAX_KEPT or self._bytes >= MAX_KEPT_BYTES

    @property
    def kept(self) -> list[str]:
        """Attempts whose results are not acknowledged, oldest first."""
        return list(self._results)

    def add(self, run: Run) -> None:
        self.runs[run.attempt] = run

    def finish(self, run: Run, result: bytes) -> None:
        self._results[run.attempt] = result
        self._bytes += len(result)

    def acknowledge(self, attempt: str) -> None:
        """Forgets a result; of what has not ended there is nothing to forget."""
        result = self._results.pop(attempt, None)
        if result is None:
            return
        self._bytes -= len(result)
        del self.runs[attempt]
        self._forgotten[attempt] = None
        if len(self._forgotten) > _MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
