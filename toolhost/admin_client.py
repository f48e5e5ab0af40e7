"""The operators' HTTP API from the other end, for commands. Blocking; asks no proxy; follows no redirect.

Above: `cli.sessions`. Below: `config`, `errors`, the standard library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

from sandboxes.spec import SessionKey
from toolhost.config import Settings
from toolhost.errors import ConfigurationError, ToolhostError

ADMIN = "/v1/admin/sessions"
OWN = "/v1/sessions"
TIMEOUT_S = 120.0  # closing waits for sandboxes to go
PIECE = 256 << 10
DIGEST = re.compile(r"#?([0-9a-f]{6,32})")


class HostUnreachable(ToolhostError):
    """Nothing answers there, or what answers is no tool host."""


class HostRefused(ToolhostError):
    """The host answered with an error. `status`: of HTTP; `code`: stable, for programs."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """`url`: `http://HOST:PORT` and a prefix if there is one. Each request has a connection of its own."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, settings: Settings) -> AdminClient:
        """The host that the settings name. Raises ConfigurationError: the token's file cannot be read."""
        return cls(url_of(settings), token_of(settings))

    # --- sessions ----------------------------------------------------------------------------------------------------

    def sessions(self, **filters: Any) -> list[dict[str, Any]]:
        """Sessions as the API shows them (docs/http.md). `filters`: principal, phase, kind, id, closed, idle_s, limit.

        Raises HostUnreachable, HostRefused, as every method does.
        """
        given = {name: str(int(value) if value is True else value) for name, value in filters.items() if value}
        found: list[dict[str, Any]] = self._json("GET", f"{ADMIN}?{urlencode(given)}")["sessions"]
        return found

    def digest(self, name: str) -> str:
        """The digest, or a beginning of it, of a session that a person named in any of the forms that lists show.

        PRINCIPAL/KIND/ID, a digest, the beginning of one, or an id that only one open session has.
        """
        if "/" in name:
            ident = name.rpartition("/")[2]
            if (match := DIGEST.fullmatch(ident)) and ident.startswith("#"):
                return match[1]
            try:
                return SessionKey.parse(name).digest()
            except ValueError:
                raise HostRefused(f"{name} is not PRINCIPAL/KIND/ID", status=400, code="name") from None
        named = self.sessions(id=name)
        if len(named) == 1:
            return str(named[0]["session"])
        if not named and (match := DIGEST.fullmatch(name)):
            return match[1]
        what = f"{len(named)} open sessions have the id {name}" if named else f"no open session has the id {name}"
        raise HostRefused(f"{what}; name one as the list does, PRINCIPAL/KIND/ID", status=404, code="session_unknown")

    def show(self, session: str) -> dict[str, Any]:
        return self._object("GET", _at(session))

    def attempts(self, session: str, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._json("GET", f"{_at(session)}/attempts?limit={limit}")["attempts"]
        return found

    def mint(self, principal: str | None, ttl_s: float | None) -> dict[str, Any]:
        """A retained session of that principal's, or else of one's own."""
        fields: dict[str, object] = {} if ttl_s is None else {"ttl_s": ttl_s}
        if principal is None:
            return self._object("POST", OWN, fields)
        return self._object("POST", ADMIN, {**fields, "principal": principal})

    def close(self, session: str) -> bool:
        return bool(self._json("DELETE", _at(session))["closed"])

    def close_many(self, *, dry_run: bool, **filters: Any) -> list[dict[str, Any]]:
        """Closes those that match; with `dry_run` only names them."""
        given = {name: value for name, value in filters.items() if value}
        answer = self._json("POST", f"{ADMIN}/close", {**given, "dry_run": dry_run})
        found: list[dict[str, Any]] = answer["would_close" if dry_run else "closed"]
        return found

    def interrupt(self, session: str) -> bool:
        return bool(self._json("POST", f"{_at(session)}/interrupt", {})["interrupted"])

    def restart(self, session: str) -> int:
        return int(self._json("POST", f"{_at(session)}/restart", {})["epoch"])

    # --- files -------------------------------------------------------------------------------------------------------

    def files(self, session: str, path: str) -> tuple[list[dict[str, Any]], bool]:
        """Entries, and whether these are all."""
        found = self._json("GET", f"{_at(session)}/files?{urlencode({'path': path})}")
        return found["files"], bool(found["complete"])

    def get_file(self, session: str, path: str, into: IO[bytes], *, archive: bool = False) -> int:
        """Writes a file, or a tar of a directory, to `into`. Returns its size."""
        place = f"archive?{urlencode({'path': path})}" if archive else f"files/{quote(path.lstrip('/'))}"
        size = 0
        with self._asked("GET", f"{_at(session)}/{place}") as answer:
            while piece := _read(answer, self.url):
                into.write(piece)
                size += len(piece)
        return size

    def put_file(self, session: str, path: str, content: IO[bytes], size: int) -> int:
        place = f"{_at(session)}/files/{quote(path.lstrip('/'))}"
        with self._asked("PUT", place, content, {"content-length": str(size)}) as answer:
            return int(_parsed(answer.read(), self.url)["size"])

    # --- inside ------------------------------------------------------------------------------------------------------

    def _object(self, method: str, path: str, fields: Mapping[str, object] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = self._json(method, path, fields)
        return found

    def _json(self, method: str, path: str, fields: Mapping[str, object] | None = None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        headers = {} if body is None else {"content-type": "application/json"}
        with self._asked(method, path, body, headers) as answer:
            return _parsed(answer.read(), self.url)

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: bytes | IO[bytes] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        target = urlsplit(self.url)
        sent = {"accept": "application/json", **(headers or {})}
        if self._token is not None:
            sent["authorization"] = f"Bearer {self._token}"
        kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
        connection = kind(target.hostname or "", target.port, timeout=self._timeout_s)
        try:
            try:
                connection.request(method, f"{target.path}{path}", body=body, headers=sent)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # A host that refuses an upload answers before it has read it all: that answer says why.
            answer = connection.getresponse()
            if answer.status >= 300:
                raise _refusal(answer, self.url)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self.url, error) from None
        finally:
            connection.close()


def _at(session: str) -> str:
    return f"{ADMIN}/{quote(session, safe='')}"


def url_of(settings: Settings) -> str:
    """The host that commands ask."""
    if settings.client.url is not None:
        return settings.client.url
    host, port = settings.server.address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.server.root_path}"


def token_of(settings: Settings) -> str | None:
    """Of a file or the environment. Never of the command line, which every user of the machine can read.

    Raises ConfigurationError.
    """
    file = settings.client.token_file
    if file is None:
        return None if settings.client.token is None else settings.client.token.get_secret_value()
    return read_token(file)


def read_token(file: Path) -> str:
    """Raises ConfigurationError."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read token file {file}: {error}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(f"token file {file} must hold one token and nothing else")
    return token


def _read(answer: http.client.HTTPResponse, url: str) -> bytes:
    try:
        return answer.read(PIECE)
    except http.client.IncompleteRead:
        raise HostUnreachable(f"{url} ended the transfer early; what came is not complete. Try again") from None


def _parsed(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HostUnreachable(f"what answers at {url} is not a tool host") from None


def _refusal(answer: http.client.HTTPResponse, url: str) -> ToolhostError:
    body = answer.read(64 << 10)
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error["code"])
    except (ValueError, LookupError, TypeError, RecursionError):
        message = body.decode("utf-8", "replace").strip() or f"{url} answered with status {answer.status}"
        code = "http"
    if answer.status == 401:
        message += "; give an admin token with --token-file FILE or TOOLHOST_CLIENT__TOKEN (make one: toolhost tokens)"
    return HostRefused(message, status=answer.status, code=code)


def _unreachable(url: str, error: Exception) -> HostUnreachable:
    if isinstance(error, ssl.SSLError):
        why = f"TLS failed: {error.reason or error}"
    elif isinstance(error, socket.gaierror):
        why = "its name is not known"
    elif isinstance(error, TimeoutError):
        why = "it does not answer in time"
    elif isinstance(error, ConnectionRefusedError):
        why = "nothing listens there"
    else:
        why = str(error) or type(error).__name__
    return HostUnreachable(
        f"no tool host is reached at {url} ({why}). If it runs elsewhere: --url http://HOST:PORT, or "
        "TOOLHOST_CLIENT__URL. If it is dead, start it (toolhost serve takes up what runs), or remove what it left: "
        "toolhost sessions prune"
    )
