"""A store in one Redis (or Valkey) server, for several hosts.

Whatever must happen together is one Lua script (`redis_scripts`). What was committed survives the host; whether it
survives Redis is Redis' own to say (`appendonly yes`), and it must not evict (`maxmemory-policy noeviction`).

A Redis that is away fails the calls of that moment with StoreUnavailable; the next calls connect again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError

from sandboxes.errors import SessionHeld, StoreConflict, StoreUnavailable
from sandboxes.spec import SessionKey
from sandboxes.stores import codec, redis_scripts
from sandboxes.stores.base import AttemptRecord, SessionFilter, SessionRecord, SharedStore
from sandboxes.stores.whole import Whole, whole

SCHEMA_VERSION = 1
CONNECTIONS = 32
ANSWER_S = 5.0
RETRIES = 3  # of one command, for a connection that was cut: every script may be repeated
LISTED_AT_ONCE = 500
ATTEMPT = ("i", "g", "a", "r", "o", "x")
Row = Sequence[bytes | None]


class RedisStore(Whole, SharedStore):
    """See the module. `url` as in `redis://:password@host:6379/0`; `prefix` is that of all keys."""

    def __init__(self, url: str, prefix: str = "toolhost:") -> None:
        super().__init__()
        self._url = url
        self._prefix = prefix
        self._opened: Any = None
        self._scripts: dict[str, Any] = {}

    async def open(self) -> None:
        with self._translated():
            self._opened = Redis.from_pool(
                BlockingConnectionPool.from_url(
                    self._url,
                    max_connections=CONNECTIONS,
                    timeout=ANSWER_S,
                    socket_timeout=ANSWER_S,
                    socket_connect_timeout=ANSWER_S,
                    health_check_interval=30,
                    retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), RETRIES),
                )
            )
            self._scripts = {
                name: self._redis.register_script(text) for name, text in vars(redis_scripts).items() if name.isupper()
            }
            await self._redis.set(f"{self._prefix}schema", SCHEMA_VERSION, nx=True)
            found = await self._redis.get(f"{self._prefix}schema")
        if int(found) > SCHEMA_VERSION:
            raise StoreUnavailable(
                f"{self._name} was written by a newer version (schema {int(found)}, this one reads {SCHEMA_VERSION}):"
                " upgrade, or use another store.prefix"
            )

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        await self.ended(ANSWER_S)
        if opened is not None:
            with contextlib.suppress(RedisError, OSError):
                await opened.aclose()

    @whole
    async def secret(self, name: str, value: str) -> str:
        """A text that all hosts of this store share: the first one's `value`."""
        with self._translated():
            await self._redis.set(f"{self._prefix}secret:{name}", value, nx=True)
            return _text(await self._redis.get(f"{self._prefix}secret:{name}"))

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def get(self, key: SessionKey) -> SessionRecord | None:
        row = await self._run("GET", str(key))
        return None if row is None else self._read(row)

    async def put(self, record: SessionRecord, *, expected_version: int | None) -> SessionRecord:
        return await self._put(record, expected_version, "")

    async def put_alone(self, record: SessionRecord, *, expected_version: int, replica: str) -> SessionRecord:
        return await self._put(record, expected_version, replica)

    async def _put(self, record: SessionRecord, expected: int | None, replica: str) -> SessionRecord:
        text = codec.write_record(record)
        closed = "" if record.closed_at is None else repr(record.closed_at)
        answer = await self._run(
            "PUT",
            *(str(record.key), record.incarnation, "" if expected is None else expected, secrets.token_hex(8)),
            *(record.key.principal, record.phase, repr(-record.last_used_at), closed, text, replica),
        )
        match _text(answer):
            case "held":
                raise SessionHeld("another host has the session in use", session=str(record.key))
            case "open":
                raise StoreConflict("the session is already open", session=str(record.key))
            case "conflict":
                raise StoreConflict("the session was written by somebody else", session=str(record.key))
            case version:
                return codec.read_record(text, int(version))

    async def list(self, which: SessionFilter) -> Sequence[SessionRecord]:
        found: list[SessionRecord] = []
        async for record in self._all("used" if which.include_closed else "open"):
            if len(found) >= which.limit:
                break
            if which.matches(record):
                found.append(record)
        return found

    async def _all(self, index: str) -> AsyncIterator[SessionRecord]:
        first, more = 0, True
        while more:
            rows = await self._page(index, first)
            for row in rows:
                if row[0] is not None:  # it was pruned in this moment
                    yield self._read(row)
            first, more = first + LISTED_AT_ONCE, len(rows) == LISTED_AT_ONCE

    @whole
    async def _page(self, index: str, first: int) -> Sequence[Row]:
        with self._translated():
            names = await self._redis.zrange(f"{self._prefix}{index}", first, first + LISTED_AT_ONCE - 1)
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(f"{self._prefix}session:{_text(name)}", "d", "v")
                rows: Sequence[Row] = await pipe.execute()
        return rows

    def _read(self, row: Row) -> SessionRecord:
        with self._readable():
            return codec.read_record(_text(row[0]), int(_text(row[1])))

    # --- attempts ----------------------------------------------------------------------------------------------------

    async def register(self, attempt: AttemptRecord) -> AttemptRecord:
        key, at = str(attempt.session), repr(attempt.registered_at)
        row = await self._run("REGISTER", key, attempt.attempt_id, attempt.incarnation, attempt.digest, at)
        return attempt if row is None else self._read_attempt(attempt.session, attempt.attempt_id, row)

    async def settle(self, *attempts: AttemptRecord) -> None:
        arguments: list[str] = []
        for attempt in attempts:
            if attempt.outcome is None:
                raise ValueError("an attempt is settled with an outcome")
            receipt = attempt.outcome.receipt
            arguments += [str(attempt.session), attempt.attempt_id, attempt.incarnation, attempt.digest]
            arguments += [repr(attempt.registered_at), repr(receipt.ended_at)]
            arguments += [codec.write_receipt(receipt), codec.write_outcome(attempt.outcome)]
        if arguments:
            await self._run("SETTLE", *arguments)

    @whole
    async def attempt(self, key: SessionKey, attempt_id: str) -> AttemptRecord | None:
        with self._translated():
            row = await self._redis.hmget(f"{self._prefix}attempt:{key}\0{attempt_id}", *ATTEMPT)
        return None if row[0] is None else self._read_attempt(key, attempt_id, row)

    @whole
    async def attempts(self, key: SessionKey, *, limit: int = 100, unsettled: bool = False) -> Sequence[AttemptRecord]:
        index = f"{self._prefix}{'unsettled' if unsettled else 'attempts'}:{key}"
        with self._translated():
            names = [_text(name) for name in await self._redis.zrange(index, 0, limit - 1)]
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(f"{self._prefix}attempt:{key}\0{name}", *ATTEMPT)
                rows = await pipe.execute()
        found = zip(names, rows, strict=True)
        return [self._read_attempt(key, name, row) for name, row in found if row[0] is not None]

    def _read_attempt(self, key: SessionKey, attempt_id: str, row: Row) -> AttemptRecord:
        receipt, outcome = (None if part is None else _text(part) for part in row[3:5])
        with self._readable():
            return AttemptRecord(
                session=key,
                incarnation=_text(row[0]),
                attempt_id=attempt_id,
                digest=_text(row[1]),
                registered_at=float(_text(row[2])),
                receipt=None if receipt is None else codec.read_receipt(receipt),
                outcome=None if receipt is None or outcome is None else codec.read_outcome(outcome, receipt),
                pruned=row[5] is not None,
            )

    # --- resources ---------------------------------------------------------------------------------------------------

    @whole
    async def put_parts(self, key: SessionKey, resource: str, parts: Mapping[str, bytes | None]) -> None:
        place = f"{self._prefix}parts:{key}\0{resource}"
        gone = [part for part, state in parts.items() if state is None]
        kept = {part: state for part, state in parts.items() if state is not None}
        with self._translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hincrby(f"{self._prefix}resources:{key}", resource, 1)
                if gone:
                    pipe.hdel(place, *gone)
                if kept:
                    pipe.hset(place, mapping=kept)
                await pipe.execute()

    @whole
    async def get_parts(self, key: SessionKey, resource: str) -> Mapping[str, bytes]:
        with self._translated():
            found = await self._redis.hgetall(f"{self._prefix}parts:{key}\0{resource}")
        return {_text(part): bytes(state) for part, state in found.items()}

    @whole
    async def parts_version(self, key: SessionKey, resource: str) -> int:
        with self._translated():
            return int(await self._redis.hget(f"{self._prefix}resources:{key}", resource) or 0)

    async def prune(self, *, closed_before: float, outcomes_before: float) -> int:
        rows = 0
        for script, before in (("PRUNE_CLOSED", closed_before), ("PRUNE_OUTCOMES", outcomes_before)):
            more = 1
            while more:
                done, more = await self._run(script, repr(before))
                rows += done
        return rows

    # --- replicas ----------------------------------------------------------------------------------------------------

    async def beat(self, replica: str, ttl_s: float, said: Mapping[str, object]) -> bool:
        return bool(await self._run("BEAT", replica, max(1, round(ttl_s * 1000)), json.dumps(said)))

    @whole
    async def leave(self, replica: str) -> None:
        with self._translated():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(f"{self._prefix}beat:{replica}")
                pipe.zrem(f"{self._prefix}replicas", replica)
                await pipe.execute()

    async def replicas(self) -> Mapping[str, Mapping[str, object]]:
        found = await self._run("REPLICAS")
        with self._readable():
            return {_text(name): json.loads(said) for name, said in _pairs(found)}

    async def hold(self, key: SessionKey, incarnation: str, replica: str, *, attached: bool) -> bool:
        return bool(await self._run("HOLD", str(key), incarnation, replica, "a" if attached else "b"))

    @whole
    async def release(self, key: SessionKey, replica: str) -> None:
        with self._translated():
            await self._redis.hdel(f"{self._prefix}holds:{key}", replica)

    async def holders(self, key: SessionKey, *, dead: bool = False) -> Mapping[str, bool]:
        found = await self._run("HOLDERS", str(key), "0" if dead else "1")
        return {_text(name): how == b"a" for name, how in _pairs(found)}

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _redis(self) -> Any:
        if self._opened is None:
            raise StoreUnavailable(f"{self._name} is not open")
        return self._opened

    @property
    def _name(self) -> str:
        """The server, without what is secret in its URL."""
        parts = urlsplit(self._url)
        return f"the Redis server at {parts.hostname or parts.path}:{parts.port or 6379}"

    @whole
    async def _run(self, script: str, *arguments: str | int) -> Any:
        with self._translated():
            client = self._redis
            return await self._scripts[script](keys=[self._prefix], args=arguments, client=client)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise StoreUnavailable(f"{self._name} refuses the password or user of store.url ({error})") from error
        except ResponseError as error:
            what = "is full: give it more memory" if "maxmemory" in str(error) else "refused a command"
            raise StoreUnavailable(f"{self._name} {what} ({error})") from error
        except (RedisError, OSError, ValueError) as error:
            raise StoreUnavailable(
                f"{self._name} cannot be reached: start it, or mend store.url ({_reason(error)})"
            ) from error

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise StoreUnavailable(f"{self._name} holds a row that cannot be read: {error}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _text(value: bytes | None) -> str:
    if value is None:
        raise ValueError("a field is missing")
    return value.decode()


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
