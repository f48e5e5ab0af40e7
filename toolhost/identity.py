"""A request to a session: whose key, of which kind, and what ends it. The only such place.

Above: transports. Below: `config`, `errors`. Everything read here is untrusted text.
Rules: a session id is 1 to 128 characters of `A-Z a-z 0-9 . _ : -`; `x-toolhost-session` (or `/s/{session}` in the URL)
wins over `x-session-id`; two different values of one name are refused, not guessed between.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sandboxes.spec import KeyKind, Retention, SessionKey, SessionRequest
from toolhost.config import DOMAIN, Settings
from toolhost.errors import Refused

Headers = Iterable[tuple[bytes, bytes]]

SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID = re.compile(r"resp_[0-9a-f]+")  # what vLLM mints for every response
RETAINED_CHARACTERS = 22  # 22 characters of a 64-letter alphabet carry 132 bits
# Of the estimate below. 22 random characters of 64 letters have 70 or more, a UUID 95, a minted key 120.
RETAINED_BITS = 64.0
_REPEATED = 3  # characters that stood there before, together: no coincidence in a key

_OWN = b"x-toolhost-session"
_SHARED = b"x-session-id"
_TTL = b"x-toolhost-ttl"
_CONTENT = b"x-toolhost-content"
_ALLOW = b"x-toolhost-allow-domains"
_DENY = b"x-toolhost-deny-domains"

MAX_DOMAINS = 500


@dataclass(frozen=True, slots=True)
class Named:
    """What a request says about its session. Equal when two requests of a connection name the same one."""

    kind: KeyKind
    id: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection's calls cannot run, as text for the model and whoever reads its transcript."""

    text: str


@dataclass(frozen=True, slots=True)
class Domains:
    """What a connection narrows the browser to. Each list of `allow` must have a host; none of `deny` may."""

    allow: tuple[tuple[str, ...], ...] = ()
    deny: tuple[str, ...] = ()


NOT_NARROWED = Domains()


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose session a connection uses, or why it can use none; and whether it takes more than one text block."""

    session: SessionRequest | Refusal
    rich: bool = False
    domains: Domains = NOT_NARROWED


def named(headers: Headers, url_session: str | None = None) -> Named | Refusal | None:
    """The session that a request names, None when it names none."""
    own: set[str] = set() if url_session is None else {url_session}
    shared: set[str] = set()
    for name, value in headers:
        if name == _OWN:
            own.add(value.decode("latin-1"))
        elif name == _SHARED:
            shared.add(value.decode("latin-1"))
    if own:
        return _one(own, KeyKind.RETAINED, "x-toolhost-session (or /s/ in the URL)")
    if shared:
        return _one(shared, KeyKind.REQUEST, "x-session-id")
    return None


def identify(
    headers: Headers, *, principal: str, settings: Settings, connection_id: str, url_session: str | None = None
) -> Identity:
    """The identity of a new connection. Never raises: what is wrong becomes a `Refusal` for its calls."""
    headers = list(headers)
    found = named(headers, url_session)
    if found is None:
        found = Named(KeyKind.CONNECTION, connection_id)
    rich = any(name == _CONTENT and value.strip().lower() == b"rich" for name, value in headers)
    if isinstance(found, Refusal):
        return Identity(found, rich)
    if found.kind is KeyKind.RETAINED and (refusal := _guessable(found.id, settings)):
        return Identity(refusal, rich)
    ttl_s = _ttl(headers, settings)
    if isinstance(ttl_s, Refusal):
        return Identity(ttl_s, rich)
    domains = _domains(headers)
    if isinstance(domains, Refusal):
        return Identity(domains, rich)
    key = SessionKey(principal, found.kind, found.id)
    return Identity(SessionRequest(key, _retention(found), ttl_s), rich, domains)


def keyed(kind: str, ident: str, *, principal: str, settings: Settings) -> SessionKey:
    """The key that a URL of the HTTP API names, by the same rules. Raises Refused."""
    try:
        found = KeyKind(kind)
    except ValueError:
        raise Refused(404, f"no kind of session {kind[:64]!r}: request, retained or connection") from None
    if not SESSION_ID.fullmatch(ident):
        raise Refused(400, "not a session id: 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    if found is KeyKind.RETAINED and (refusal := _guessable(ident, settings)):
        raise Refused(403, refusal.text)
    return SessionKey(principal, found, ident)


def label(key: SessionKey) -> str:
    """How logs name a session. A retained id is a bearer secret: its digest stands for it."""
    if key.kind is KeyKind.RETAINED:
        return f"{key.principal}/{key.kind.value}/#{key.digest()[:12]}"
    return str(key)


def _one(values: set[str], kind: KeyKind, name: str) -> Named | Refusal:
    if len(values) > 1:
        return Refusal(f"The session id in {name} was sent with {len(values)} different values. Send exactly one.")
    value = values.pop()
    if not SESSION_ID.fullmatch(value):
        return Refusal(
            f"The session id in {name} is not valid ({len(value)} characters). "
            "Use 1 to 128 characters of A-Z a-z 0-9 . _ : - and nothing else."
        )
    return Named(kind, value)


def _retention(found: Named) -> Retention:
    if found.kind is KeyKind.RETAINED:
        return Retention.RETAINED
    if found.kind is KeyKind.CONNECTION:
        return Retention.CONNECTION
    return Retention.REQUEST if REQUEST_ID.fullmatch(found.id) else Retention.CHOSEN


def estimated_bits(key: str) -> float:
    """At most how much chance is in a key, in bits: by how often each character comes, by the steps from one to the
    next (counting up or along the alphabet is no chance), and without what repeats. It cannot tell a phrase of many
    words from chance."""
    steps = [ord(after) - ord(before) for before, after in pairwise(key)]
    by_character = _bits(key)
    new, at = 0, 0
    while at < len(key):
        size = 0
        while at + size < len(key) and key[at : at + size + 1] in key[: at + size]:
            size += 1
        at += size if size >= _REPEATED else 1
        new += 1
    return min(by_character, _bits(steps), new * by_character / max(1, len(key)))


def _bits(symbols: Sequence[Hashable]) -> float:
    """Shannon's entropy of how often each comes, times how many there are."""
    count = len(symbols)
    return sum(times * math.log2(count / times) for times in Counter(symbols).values())


def _guessable(ident: str, settings: Settings) -> Refusal | None:
    if settings.server.loopback or settings.auth.retained_keys == "any":
        return None
    if len(ident) >= RETAINED_CHARACTERS and estimated_bits(ident) >= RETAINED_BITS:
        return None
    return Refusal(
        "The retained session key is too easy to guess on a host that others can reach. Use a minted one "
        f"(`toolhost sessions new`) or at least {RETAINED_CHARACTERS} random characters; an operator can set "
        'auth.retained_keys = "any".'
    )


def _ttl(headers: Headers, settings: Settings) -> float | Refusal | None:
    values = {value for name, value in headers if name == _TTL}
    if not values:
        return None
    try:
        (value,) = values
        ttl_s = float(value)
    except ValueError:
        ttl_s = math.nan
    if not (math.isfinite(ttl_s) and ttl_s > 0):
        return Refusal("x-toolhost-ttl is not valid: send one positive number of seconds.")
    return min(ttl_s, settings.lifecycle.max_ttl_s)


def _domains(headers: Headers) -> Domains | Refusal:
    """The domain lists of a connection. A header that comes twice narrows twice: whoever adds one cannot widen."""
    allow: list[tuple[str, ...]] = []
    deny: list[str] = []
    for name, value in headers:
        if name not in (_ALLOW, _DENY):
            continue
        found = [item.strip() for item in value.decode("utf-8", "replace").split(",")]
        found = [item for item in found if item]
        if not found or len(found) > MAX_DOMAINS or not all(map(DOMAIN.fullmatch, found)):
            return Refusal(
                f"{name.decode()} is not valid: send 1 to {MAX_DOMAINS} host names separated by commas, for example "
                "example.org,docs.python.org; without the header nothing is narrowed."
            )
        if name == _ALLOW:
            allow.append(tuple(found))
        else:
            deny += found
    return Domains(tuple(allow), tuple(deny))
