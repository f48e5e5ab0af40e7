"""A store in one Redis (or Valkey) server, for several gateways.

A row is a hash of its version and its JSON, a log is a list beside it, and one sorted set holds what is due. Every
write is one Lua script, which Redis runs alone: all of its changes happen, or none. Keys of one write lie on one node,
so a cluster is not supported; a primary with replicas is. What was written is announced on one channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sandboxes.stores.whole import Whole, whole
from toolhost.gateway.stores.base import Append, Change, Check, Conflict, Put, Remove, Row, Store, StoreError

# ARGV is flat: for each change its kind, its key and four or more fields. Answers the conflicting key, or nothing.
WRITE = """
local prefix = KEYS[1]
local changes, i = {}, 1
while i <= #ARGV do
  local kind, key = ARGV[i], ARGV[i + 1]
  local row = prefix .. 'row:' .. key
  local change = {kind = kind, key = key, row = row, log = prefix .. 'log:' .. key}
  if kind == 'append' then
    change.first, change.count = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
    change.at = i + 4
    if redis.call('LLEN', change.log) ~= change.first then return key end
    i = i + 4 + change.count
  else
    if ARGV[i + 2] ~= '' and tonumber(redis.call('HGET', row, 'v') or '0') ~= tonumber(ARGV[i + 2]) then return key end
    change.expected = ARGV[i + 2]
    if kind == 'put' then
      change.data, change.due, change.ttl = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
      i = i + 6
    else
      i = i + 3
    end
  end
  changes[#changes + 1] = change
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
for _, c in ipairs(changes) do
  if c.kind == 'put' then
    redis.call('HSET', c.row, 'v', tonumber(c.expected) + 1, 'd', c.data)
    if c.ttl == '' then redis.call('PERSIST', c.row) else
      redis.call('PEXPIRE', c.row, c.ttl)
      redis.call('PEXPIRE', c.log, c.ttl)
    end
    if c.due == '' then redis.call('ZREM', prefix .. 'due', c.key) else
      redis.call('ZADD', prefix .. 'due', now + tonumber(c.due), c.key)
    end
  elseif c.kind == 'remove' then
    redis.call('DEL', c.row, c.log)
    redis.call('ZREM', prefix .. 'due', c.key)
  elseif c.kind == 'append' then
    for n = c.at, c.at + c.count - 1 do redis.call('RPUSH', c.log, ARGV[n]) end
    local left = redis.call('PTTL', c.row)
    if left > 0 then redis.call('PEXPIRE', c.log, left) end
  end
  if c.kind ~= 'check' then redis.call('PUBLISH', prefix .. 'written', c.key) end
end
return false
"""
DUE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local found = {}
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1] .. 'due', '-inf', now, 'LIMIT', 0, ARGV[1])) do
  if redis.call('EXISTS', KEYS[1] .. 'row:' .. key) == 1 then found[#found + 1] = key
  else redis.call('ZREM', KEYS[1] .. 'due', key) end
end
return found
"""
RECONNECT_S = 0.5
CLOSE_S = 5.0


class RedisStore(Whole, Store):
    """See the module. `url` as in `redis://:password@host:6379/0`; `prefix` is that of all keys."""

    shared = True

    def __init__(self, url: str, prefix: str = "toolhost:") -> None:
        super().__init__()
        self._prefix = prefix
        self._redis: Any = Redis.from_url(url, decode_responses=True, health_check_interval=30)
        self._script = self._redis.register_script(WRITE)
        self._due = self._redis.register_script(DUE)
        self._listener: asyncio.Task[None] | None = None

    async def open(self) -> None:
        with _translated():
            await self._redis.ping()
        listening = asyncio.Event()
        self._listener = asyncio.create_task(self._listen(listening))
        await listening.wait()

    async def close(self) -> None:
        if self._listener is not None:
            while not self._listener.done():  # once may not be enough: see `sandboxes.stores.whole`
                self._listener.cancel()
                await asyncio.wait({self._listener}, timeout=RECONNECT_S)
        await self.ended(CLOSE_S)
        await self._redis.aclose()

    async def get(self, key: str) -> Row | None:
        return (await self.get_many([key]))[0]

    @whole
    async def get_many(self, keys: Sequence[str]) -> list[Row | None]:
        if not keys:
            return []
        with _translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.hmget(f"{self._prefix}row:{key}", "v", "d")
                found = await pipe.execute()
        return [
            None if version is None else Row(key, int(version), json.loads(data))
            for key, (version, data) in zip(keys, found, strict=True)
        ]

    @whole
    async def write(self, *changes: Change, patience_s: float = 0.0) -> None:
        arguments = [text for change in changes for text in _arguments(change)]
        with _translated():
            conflict = await self._script(keys=[self._prefix], args=arguments)
        if conflict:
            raise Conflict(str(conflict))

    @whole
    async def entries(self, key: str, first: int = 0, limit: int = 1000) -> list[str]:
        with _translated():
            found: list[str] = await self._redis.lrange(f"{self._prefix}log:{key}", first, first + limit - 1)
        return found

    @whole
    async def due(self, limit: int = 100) -> list[str]:
        with _translated():
            found: list[str] = await self._due(keys=[self._prefix], args=[limit])
        return found

    async def clear_due(self) -> None:
        raise StoreError("other gateways may be alive: their rows are not due")

    async def _listen(self, listening: asyncio.Event) -> None:
        """Pass on what was written. After a lost connection everybody is woken: something may have been missed."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(f"{self._prefix}written")
                    listening.set()
                    for key in list(self._watching):
                        self._wake(key)
                    async for message in _messages(pubsub):
                        self._wake(message)
            except (RedisError, OSError):
                await asyncio.sleep(RECONNECT_S)


async def _messages(pubsub: Any) -> AsyncIterator[str]:
    async for message in pubsub.listen():
        yield str(message["data"])


def _arguments(change: Change) -> list[str | int]:
    match change:
        case Put():
            data = json.dumps(change.data)
            return ["put", change.key, change.expected, data, _milliseconds(change.due_s), _milliseconds(change.ttl_s)]
        case Remove(key, expected):
            return ["remove", key, "" if expected is None else expected]
        case Check(key, version):
            return ["check", key, version]
        case Append(key, first, entries):
            return ["append", key, first, len(entries), *entries]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(max(1, round(seconds * 1000)))


@contextlib.contextmanager
def _translated() -> Any:
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreError(f"the gateway's Redis cannot be used: {error}") from error
