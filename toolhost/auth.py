"""Credentials to a principal and its scopes. The only such place.

Above: `app`, transports. Below: `config`, `errors`.
Tokens are kept as SHA-256 digests in one file, a line each: `NAME:SCOPE[,SCOPE]:HEX`. The file is read again when it
changes. A token is 32 random bytes, so its plain digest cannot be searched.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from toolhost.config import Settings
from toolhost.errors import ConfigurationError, Refused

log = logging.getLogger("toolhost.auth")

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
ADDRESSES = 1024  # remembered for the limit on failures; the oldest is forgotten first
CHALLENGE = (("www-authenticate", 'Bearer realm="toolhost"'), ("www-authenticate", 'Basic realm="toolhost"'))


class Scope(enum.StrEnum):
    USE = "use"  # call tools, in sessions of one's own
    ADMIN = "admin"  # list, read and close everybody's


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes


ANONYMOUS = Principal("anonymous", frozenset(Scope))


@dataclass(frozen=True, slots=True)
class _Token:
    principal: Principal
    digest: bytes


def mint(name: str, scopes: Iterable[Scope]) -> tuple[str, str]:
    """A new token and the line for the tokens file. Raises ValueError for a name that cannot be a principal."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name: 1 to 64 characters of A-Z a-z 0-9 . _ -")
    token = f"th_{secrets.token_urlsafe(32)}"
    return token, f"{name}:{','.join(sorted(scopes))}:{_digest(token).hex()}"


class Authenticator:
    """Checks the Authorization header of every request. `clock`: seconds, monotonic."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigurationError: a tokens file that cannot be used, or an open bind without one."""
        self._file = settings.auth.tokens_file
        self._clock = clock
        self._limit = settings.auth.failures_per_minute
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: (tokens left, when)
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[_Token, ...] = ()
        if self._file is None:
            if not settings.server.loopback and not settings.auth.insecure:
                raise ConfigurationError(
                    f"{settings.server.listen} can be reached by others: give --tokens-file FILE (make one with "
                    "`toolhost tokens new NAME`), or --insecure if the network itself keeps strangers out"
                )
        else:
            self._stamp, self._tokens = _read(self._file)

    @property
    def open(self) -> bool:
        """Whether everybody who can connect may use the host."""
        return self._file is None

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]], address: str, scope: Scope = Scope.USE) -> Principal:
        """The principal of a request, who has `scope`.

        Raises Refused: 401 without a right token, 429 after too many failures from one address, 403 without the scope.
        """
        if self._file is None:
            return ANONYMOUS
        self._reload()
        found = self._match(headers)
        if found is not None:
            if not found.may(scope):
                raise Refused(403, f"this token's scopes do not include `{scope}`")
            return found
        # A right token passes even from an address that failed often: behind a proxy all clients share one address.
        if not self._allow_failure(address):
            raise Refused(429, "too many failed attempts from this address", headers=(("retry-after", "60"),))
        log.warning("authentication failed", extra={"fields": {"address": address}})
        raise Refused(401, "this host needs a token: Bearer, or Basic with the token as password", headers=CHALLENGE)

    def _match(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal | None:
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1 or (token := _credential(values[0])) is None:
            return None
        digest = _digest(token)
        found: Principal | None = None
        for known in self._tokens:  # all of them, each in constant time: how long it takes tells nothing
            if hmac.compare_digest(known.digest, digest):
                found = known.principal
        return found

    def _allow_failure(self, address: str) -> bool:
        now = self._clock()
        left, when = self._failures.pop(address, (float(self._limit), now))
        left = min(float(self._limit), left + (now - when) * self._limit / 60.0)
        allowed = left >= 1
        self._failures[address] = (left - 1 if allowed else left, now)
        if len(self._failures) > ADDRESSES:
            self._failures.popitem(last=False)
        return allowed

    def _reload(self) -> None:
        assert self._file is not None
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._stamp, self._tokens = _read(self._file)
            log.info("tokens file read again", extra={"fields": {"tokens": len(self._tokens)}})
        except (OSError, ConfigurationError) as error:
            # An edit in progress must lock nobody out and let nobody in: the last good file stays in force.
            log.error("tokens file not usable, the last good one stays in force: %s", error)


def _read(file: Path) -> tuple[tuple[int, int, int], tuple[_Token, ...]]:
    try:
        stamp = _stamp(file)
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read tokens file {file}: {error}") from None
    tokens = tuple(
        _parse(file, number, line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    if not tokens:
        raise ConfigurationError(f"tokens file {file} has no tokens: add one with `toolhost tokens new NAME`")
    return stamp, tokens


def _parse(file: Path, number: int, line: str) -> _Token:
    try:
        name, scopes, hexadecimal = line.split(":")
        digest = bytes.fromhex(hexadecimal)
        if not NAME.fullmatch(name) or len(digest) != 32:
            raise ValueError
        return _Token(Principal(name, frozenset(Scope(scope.strip()) for scope in scopes.split(","))), digest)
    except ValueError:
        # The line may hold a secret that was put there in plain: it is not repeated.
        raise ConfigurationError(f"tokens file {file}, line {number}: expected NAME:SCOPE[,SCOPE]:SHA256-HEX") from None


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _credential(value: bytes) -> str | None:
    scheme, _, rest = value.decode("latin-1").partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest or None
    if scheme.lower() == "basic":
        try:
            # The user's name is not looked at: clients put anything there.
            return base64.b64decode(rest, validate=True).decode("utf-8").partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None
