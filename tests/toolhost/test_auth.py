"""Credentials to principals."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from toolhost.auth import ANONYMOUS, Authenticator, Scope, mint
from toolhost.config import load
from toolhost.errors import ConfigurationError, Refused

WRONG = [(b"authorization", b"Bearer wrong")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


def basic(user: str, password: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Basic " + base64.b64encode(f"{user}:{password}".encode()))]


def authenticator(file: Path, clock: Clock | None = None, **auth: object) -> Authenticator:
    return Authenticator(load(flags={"auth": {"tokens_file": str(file), **auth}}), clock or Clock())


def status_of(checked: Authenticator, headers: list[tuple[bytes, bytes]], address: str = "10.0.0.1") -> int:
    with pytest.raises(Refused) as refused:
        checked.authenticate(headers, address)
    return refused.value.status


@pytest.fixture
def minted(tmp_path: Path) -> tuple[str, Path]:
    token, line = mint("alice", [Scope.USE])
    file = tmp_path / "tokens"
    file.write_text(f"{line}\n")
    return token, file


def test_without_tokens_everybody_on_loopback_is_anonymous_and_an_open_bind_is_refused() -> None:
    assert Authenticator(load()).authenticate([], "") == ANONYMOUS
    with pytest.raises(ConfigurationError, match="--insecure"):
        Authenticator(load(flags={"server": {"listen": "0.0.0.0:1"}}))
    open_one = load(flags={"server": {"listen": "0.0.0.0:1"}, "auth": {"insecure": True}})
    assert Authenticator(open_one).open


def test_bearer_and_basic_carry_the_same_token(minted: tuple[str, Path]) -> None:
    token, file = minted
    checked = authenticator(file)
    for headers in (bearer(token), basic("anyone", token), basic("", token)):
        principal = checked.authenticate(headers, "")
        assert principal.name == "alice"
        assert principal.scopes == {Scope.USE}
    assert token not in file.read_text()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"bearer x",
        b"Basic",
        b"Basic !!",
        b"Basic dXNlcg==",
        b"Digest x",
        b"\xff\xfe",
        b"Basic /w==",
    ],
)
def test_what_is_no_right_token_is_401(minted: tuple[str, Path], value: bytes) -> None:
    checked = authenticator(minted[1])
    assert status_of(checked, [(b"authorization", value)]) == 401
    assert status_of(checked, []) == 401


def test_a_token_without_the_scope_is_403(tmp_path: Path) -> None:
    token, line = mint("watcher", [Scope.ADMIN])
    (tmp_path / "tokens").write_text(line)
    checked = authenticator(tmp_path / "tokens")
    assert status_of(checked, bearer(token)) == 403
    assert checked.authenticate(bearer(token), "", Scope.ADMIN).name == "watcher"


def test_two_authorization_headers_are_401_even_when_one_is_right(minted: tuple[str, Path]) -> None:
    token, file = minted
    assert status_of(authenticator(file), bearer(token) + WRONG) == 401


def test_failures_are_limited_by_address_and_a_right_token_still_passes(minted: tuple[str, Path]) -> None:
    token, file = minted
    clock = Clock()
    checked = authenticator(file, clock, failures_per_minute=3)
    assert [status_of(checked, WRONG) for _ in range(4)] == [401, 401, 401, 429]
    assert checked.authenticate(bearer(token), "10.0.0.1").name == "alice"
    assert status_of(checked, WRONG, "10.0.0.2") == 401
    clock.now += 61
    assert status_of(checked, WRONG) == 401


def test_an_edited_file_takes_effect_and_a_broken_one_does_not(minted: tuple[str, Path]) -> None:
    token, file = minted
    checked = authenticator(file)
    other, line = mint("bob", [Scope.USE, Scope.ADMIN])
    file.write_text(f"{line}\n")
    os.utime(file, ns=(1, 1))
    assert checked.authenticate(bearer(other), "").may(Scope.ADMIN)
    assert status_of(checked, bearer(token)) == 401
    file.write_text("broken\n")
    assert checked.authenticate(bearer(other), "").name == "bob"
    file.unlink()
    assert checked.authenticate(bearer(other), "").name == "bob"


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "alice\n", "alice:use:abc\n", "alice:root:" + "0" * 64, "a b:use:" + "0" * 64]
)
def test_a_tokens_file_that_cannot_be_used_stops_the_start_without_repeating_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="tokens file") as refusal:
        authenticator(file)
    assert "0" * 64 not in refusal.value.message


def test_a_missing_tokens_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read tokens file"):
        authenticator(tmp_path / "missing")


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "x" * 65, "a b"])
def test_a_name_that_is_no_principal_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        mint(name, [Scope.USE])
