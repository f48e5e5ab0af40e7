"""What each frame of a host means. One method a request; a wrong field is `bad_request` and nothing happened.

Above: `supervisor`. Below: `executions`, `connections`, `python`, `transfers`.
"""

from __future__ import annotations

import time

from . import wire
from .connections import Connection
from .run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .connections import Connections
    from .executions import Executions
    from .python import Python
    from .transfers import Transfers

_MAX_NAME = 256
_MAX_TICKET = 4096


class BadRequest(ValueError):
    """A field is missing, or of the wrong kind or size."""


class Refused(Exception):
    """A well-formed request that is not granted; `code` is one of wire.ERRORS."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Waiting:
    """One request on one connection that gets more than one reply."""

    def __init__(self, connection: Connection, ident: object) -> None:
        self.connection = connection
        self._ident = ident
        self._announced: Run | None = None
        self._accepted = False  # it was told

    def announce(self, run: Run) -> None:
        """That it was accepted, or has started: left out where the result comes soon, which says the same."""
        if self._announced is None:
            self._announced = run
            self.connection.linger(self._tell)

    def _tell(self) -> None:
        run, self._announced = self._announced, None
        if run is None:
            return
        told: dict[str, object] = {"id": self._ident, "sequence": run.sequence, "epoch": run.epoch}
        if not self._accepted:
            self._accepted = True
            self.connection.queue({"t": "accepted", **told})
        if run.started_at is not None:
            self.connection.queue({"t": "started", **told, "at": run.started_at})

    def send_line(self, line: bytes) -> None:
        """The result: a frame without an id, encoded already."""
        self._announced = None
        ident = self._ident
        head = b'{"id":%d,' % ident if type(ident) is int else wire.encode({"id": ident})[:-2] + b","
        self.connection.send_line(head + line[1:])

    def send_output(self, text: str) -> None:
        self._tell()
        for start in range(0, len(text), wire.OUTPUT_PIECE):
            piece = text[start : start + wire.OUTPUT_PIECE]
            self.connection.send_if_room({"t": "output", "id": self._ident, "text": piece})


class Requests:
    """Knows whose sandbox it is (the claim) and hands each request on."""

    def __init__(
        self,
        config: Config,
        executions: Executions,
        python: Python,
        transfers: Transfers,
        stop: Callable[[], None],
    ) -> None:
        self._config = config
        self._executions = executions
        self._python = python
        self._transfers = transfers
        self._stop = stop
        self.connections: Connections | None = None
        self._claim: tuple[str, str] | None = None
        self._born = time.time()
        self._calls: dict[str, Callable[[Connection, object, dict[str, object]], None]] = {
            "ping": self._ping,
            "claim": self._take_claim,
            "exec": self._exec,
            "attach": self._attach,
            "cancel": self._cancel,
            "ack": self._ack,
            "restart": self._restart,
            "status": self._status,
            "files": self._files,
            "stop": self._end,
        }

    def handle(self, connection: Connection, frame: dict[str, object]) -> None:
        ident = frame.get("id")
        if not isinstance(ident, (str, int)) or (isinstance(ident, str) and len(ident) > _MAX_NAME):
            ident = None
        kind = frame["t"]
        if kind == "hello":
            self._hello(connection, ident, frame)
            return
        if not connection.greeted:
            self._error(connection, ident, "refused", "hello comes first")
            connection.end()
            return
        try:
            self._calls[str(kind)](connection, ident, frame)
        except BadRequest as error:
            self._error(connection, ident, "bad_request", str(error))
        except Refused as error:
            self._error(connection, ident, error.code, str(error))

    def closed(self, connection: Connection) -> None:
        self._executions.leave(connection)
        self._transfers.leave(connection)

    # --- one method a request

    def _hello(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        assert self.connections is not None
        refusal = self.connections.refusal(frame)
        if refusal is not None:
            self._error(connection, ident, refusal, f"this agent speaks version {wire.VERSION}, to who knows its nonce")
            connection.end()
            return
        if connection.greeted:
            self.closed(connection)
        connection.welcome()
        connection.resynchronize()
        executions = self._executions
        claim = None if self._claim is None else {"ticket": self._claim[0], "session": self._claim[1]}
        connection.send(
            {
                "t": "hello",
                "id": ident,
                "v": wire.VERSION,
                "sandbox": self._config.sandbox,
                "python": self._python.version,
                "state": self._state(),
                "claim": claim,
                "epoch": executions.epoch,
                "sequence": executions.sequence,
                "running": executions.current.attempt if executions.current else None,
                "kept": executions.attempts.kept,
                "acks": True,
            }
        )

    def _ping(self, connection: Connection, ident: object, _frame: dict[str, object]) -> None:
        connection.send({"t": "ok", "id": ident})

    def _take_claim(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        claim = (_text(frame, "ticket", _MAX_TICKET), _text(frame, "session", _MAX_TICKET))
        epoch, sequence = _count(frame, "epoch"), _count(frame, "sequence")
        if self._claim is not None and self._claim != claim:
            raise Refused("claimed", "the sandbox belongs to another session")
        if self._claim is None:
            self._claim = claim
            self._executions.session = claim[1]
            self._executions.epoch = epoch
            self._executions.sequence = sequence
        connection.send({"t": "ok", "id": ident})

    def _exec(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        if self._claim is None:
            raise Refused("unclaimed", "the sandbox belongs to no session yet")
        run = self._read_run(frame)
        attempts = self._executions.attempts
        if "acked" in frame:
            self._acknowledge(frame["acked"])
        known = attempts.runs.get(run.attempt)
        if known is not None:
            if known.digest != run.digest:
                raise Refused("conflict", "this attempt id was used for something else")
            self._executions.join(known, Waiting(connection, ident))
        elif attempts.forgotten(run.attempt):
            raise Refused("unknown", "this attempt's result was acknowledged and forgotten")
        elif self._executions.full:
            raise Refused("busy", "too many executions wait, or too many results were not acknowledged")
        else:
            self._executions.submit(run, Waiting(connection, ident))

    def _read_run(self, frame: dict[str, object]) -> Run:
        kind = frame.get("kind")
        call = frame.get("call")
        if kind not in ("python", "shell") or not isinstance(call, dict):
            raise BadRequest("kind is python or shell, and call its arguments")
        if kind == "python" and not isinstance(call.get("code"), str):
            raise BadRequest("code is a text")
        if kind == "shell":
            from .shells import check

            problem = check(call, self._config)
            if problem:
                raise BadRequest(problem)
        timeout = frame.get("timeout")
        if timeout is None:
            timeout = self._config.timeout_s
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout <= 1e7:
            raise BadRequest("timeout is a number of seconds above 0")
        cap = frame.get("cap", 20_000)
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise BadRequest("cap is a number of characters above 0")
        queued = frame.get("queued")
        if not isinstance(queued, (int, float)) or isinstance(queued, bool):
            queued = time.time()
        return Run(
            _text(frame, "attempt", _MAX_NAME),
            _text(frame, "digest", _MAX_NAME),
            str(kind),
            call,
            float(timeout),
            min(cap, wire.MAX_CAP),
            float(queued),
        )

    def _attach(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        self._executions.join(self._known(frame), Waiting(connection, ident))

    def _cancel(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        why = frame.get("why", "cancel")
        if why not in ("cancel", "operator"):
            raise BadRequest("why is cancel or operator")
        run = self._known(frame)
        connection.send({"t": "ok", "id": ident})
        self._executions.cancel(run, str(why))

    def _ack(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        self._acknowledge(frame.get("attempts"))
        connection.announce({"t": "ok", "id": ident})

    def _acknowledge(self, attempts: object) -> None:
        if not isinstance(attempts, list) or not all([isinstance(attempt, str) for attempt in attempts]):  # noqa: C419 - cheaper
            raise BadRequest("what is acknowledged is a list of attempt ids")
        for attempt in attempts:
            self._executions.attempts.acknowledge(attempt)

    def _restart(self, connection: Connection, ident: object, _frame: dict[str, object]) -> None:
        self._python.restart(lambda: connection.send({"t": "ok", "id": ident, "epoch": self._executions.epoch}))

    def _status(self, connection: Connection, ident: object, _frame: dict[str, object]) -> None:
        executions = self._executions
        status: dict[str, object] = {
            "state": self._state(),
            "epoch": executions.epoch,
            "sequence": executions.sequence,
            "running": executions.current.attempt if executions.current else None,
            "waiting": executions.waiting,
            "uptime_s": time.time() - self._born,
        }
        connection.send({"t": "ok", "id": ident, "status": status})

    def _files(self, connection: Connection, ident: object, frame: dict[str, object]) -> None:
        self._transfers.begin(connection, ident, frame)

    def _end(self, connection: Connection, ident: object, _frame: dict[str, object]) -> None:
        connection.send({"t": "ok", "id": ident})
        self._stop()

    # --- shared

    def _state(self) -> str:
        if self._executions.current is not None:
            return "running"
        return "idle" if self._python.ready else "starting"

    def _known(self, frame: dict[str, object]) -> Run:
        run = self._executions.attempts.find(_text(frame, "attempt", _MAX_NAME))
        if run is None:
            raise Refused("unknown", "no such attempt, or it was acknowledged and forgotten")
        return run

    @staticmethod
    def _error(connection: Connection, ident: object, code: str, message: str) -> None:
        connection.send({"t": "error", "id": ident, "code": code, "message": message[:500]})


def _text(frame: dict[str, object], key: str, longest: int) -> str:
    value = frame.get(key)
    if not isinstance(value, str) or not value or len(value) > longest:
        raise BadRequest(f"{key} is a text of 1 to {longest} characters")
    return value


def _count(frame: dict[str, object], key: str) -> int:
    value = frame.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise BadRequest(f"{key} is a whole number")
    return value
