"""Which session a request names, and what ends it."""

from __future__ import annotations

import secrets
import uuid

import pytest

from sandboxes.spec import KeyKind, Retention, SessionKey, SessionRequest
from toolhost.config import Settings, load
from toolhost.identity import Identity, Refusal, identify, label

LOCAL = load(flags={"server": {"listen": "127.0.0.1:1"}})
OPEN = load(flags={"server": {"listen": "0.0.0.0:1"}})


def of(headers: dict[str, str], settings: Settings = LOCAL, url_session: str | None = None) -> Identity:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return identify(pairs, principal="p", settings=settings, connection_id="conn", url_session=url_session)


def session(identity: Identity) -> SessionRequest:
    assert isinstance(identity.session, SessionRequest), identity
    return identity.session


def refusal(identity: Identity) -> str:
    assert isinstance(identity.session, Refusal), identity
    return identity.session.text


@pytest.mark.parametrize(
    ("headers", "kind", "ident", "retention"),
    [
        ({}, KeyKind.CONNECTION, "conn", Retention.CONNECTION),
        ({"x-session-id": "resp_0a1b"}, KeyKind.REQUEST, "resp_0a1b", Retention.REQUEST),
        ({"x-session-id": "resp_xyz"}, KeyKind.REQUEST, "resp_xyz", Retention.CHOSEN),
        ({"x-session-id": "resp_"}, KeyKind.REQUEST, "resp_", Retention.CHOSEN),
        ({"x-session-id": "mine"}, KeyKind.REQUEST, "mine", Retention.CHOSEN),
        ({"x-session-id": "m", "x-toolhost-session": "own"}, KeyKind.RETAINED, "own", Retention.RETAINED),
    ],
)
def test_headers_decide_kind_id_and_retention(
    headers: dict[str, str], kind: KeyKind, ident: str, retention: Retention
) -> None:
    found = session(of(headers))
    assert found.key == SessionKey("p", kind, ident)
    assert found.retention is retention


def test_the_url_names_a_retained_session_and_differing_from_the_header_is_refused() -> None:
    assert session(of({}, url_session="u")).key.kind is KeyKind.RETAINED
    assert session(of({"x-toolhost-session": "u"}, url_session="u")).key.id == "u"
    assert "different values" in refusal(of({"x-toolhost-session": "v"}, url_session="u"))
    assert "not valid" in refusal(of({}, url_session="a b"))


def test_an_invalid_own_header_does_not_fall_back_to_the_other() -> None:
    assert "x-toolhost-session" in refusal(of({"x-session-id": "ok", "x-toolhost-session": "not ok"}))


@pytest.mark.parametrize("ident", ["short", "a" * 40, "abababababababababababababab", "0" * 128])
def test_a_guessable_retained_key_is_refused_where_others_can_connect(ident: str) -> None:
    headers = {"x-toolhost-session": ident}
    assert "easy to guess" in refusal(of(headers, OPEN))
    assert session(of(headers, LOCAL)).key.id == ident
    anything = load(flags={"server": {"listen": "0.0.0.0:1"}, "auth": {"retained_keys": "any"}})
    assert session(of(headers, anything)).key.id == ident


@pytest.mark.parametrize(
    "ident",
    [
        "aaaaaaaaaaaaabcdefghij",
        "abcdefghijklmnopqrstuvwxyz",
        "zyxwvutsrqponmlkjihgfedcba",
        "1234567890" * 12,
        "k7Qz9xPw2Yb" * 11,
        "aAbBcCdDeEfFgGhHiIjJkK",
        "00000000-0000-0000-0000-000000000001",
        "A" * 100 + "BCDEFGHIJKLM",
        "password-password-password-password",
        "secret-secret-session-session-key-key",
    ],
)
def test_a_long_key_without_chance_in_it_is_guessable(ident: str) -> None:
    assert "easy to guess" in refusal(of({"x-toolhost-session": ident}, OPEN))


def test_a_random_retained_key_is_taken_where_others_can_connect() -> None:
    assert session(of({"x-toolhost-session": "Zk3vQ9xLr2TtYw8PbN5sHd"}, OPEN)).key.id
    makers = (lambda: secrets.token_urlsafe(24), lambda: str(uuid.uuid4()), lambda: secrets.token_hex(16))
    for make in makers:  # the first as they are minted
        keys = [make() for _ in range(2000)]
        assert [key for key in keys if isinstance(of({"x-toolhost-session": key}, OPEN).session, Refusal)] == []


def test_a_time_to_live_only_narrows() -> None:
    headers = {"x-toolhost-session": "k", "x-toolhost-ttl": "60"}
    assert session(of(headers)).ttl_s == 60
    assert session(of({**headers, "x-toolhost-ttl": "1e9"})).ttl_s == LOCAL.lifecycle.max_ttl_s
    assert session(of({"x-toolhost-session": "k"})).ttl_s is None


def test_rich_content_is_asked_for_by_header() -> None:
    assert of({"x-toolhost-content": "Rich"}).rich
    assert not of({"x-toolhost-content": "plain"}).rich


def test_logs_never_show_a_retained_id() -> None:
    assert "secret" not in label(SessionKey("p", KeyKind.RETAINED, "secret"))
    assert label(SessionKey("p", KeyKind.REQUEST, "resp_1")) == "p/request/resp_1"
