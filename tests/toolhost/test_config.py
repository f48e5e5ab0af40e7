"""Settings: precedence, refusals, and where each comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from toolhost.config import Settings, load, split_address
from toolhost.errors import ConfigurationError
from toolhost.namespaces import registry


def file_with(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "toolhost.toml"
    file.write_text(text)
    return file


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_with(tmp_path, '[python]\ntimeout_s = 1\nmax_characters = 1001\n[server]\nlisten = "1.1.1.1:1"\n')
    monkeypatch.setenv("TOOLHOST_PYTHON__TIMEOUT_S", "2")
    monkeypatch.setenv("TOOLHOST_SERVER__LISTEN", "127.0.0.1:2")
    settings = load(file, {"server": {"listen": "127.0.0.1:3", "root_path": None}})
    assert settings.python.max_characters == 1001
    assert settings.python.timeout_s == 2
    assert settings.server.address == ("127.0.0.1", 3)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[server]\nlissen = 1\n", "server.lissen"),
        ("[servr]\n", "servr"),
        ("colour = 1\n", "colour"),
        ("[server]\nping_s = 16\n", "server.ping_s"),
        ("[python]\ntimeout_s = 0\n", "python.timeout_s"),
        ("[python]\ntimeout_s = 'soon'\n", "python.timeout_s"),
        ("[sandbox]\nbackend = 'none'\n", "sandbox.backend"),
        ("server = 3\n", "server"),
        ("[server]\nroot_path = 'no-slash'\n", "server.root_path"),
    ],
)
def test_an_unknown_or_impossible_setting_is_refused_by_name_and_file(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        load(file_with(tmp_path, text))
    assert word in refusal.value.message
    assert "toolhost.toml" in refusal.value.message


@pytest.mark.parametrize("name", ["TOOLHOST_NOTHING__X", "TOOLHOST_SERVER__LISTEM", "TOOLHOST_LISTEN"])
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=r"TOOLHOST_|listem"):
        load()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TOOLHOST_SANDBOX": "foo"}, "TOOLHOST_SANDBOX names a group; set TOOLHOST_SANDBOX__NAME"),
        ({"toolhost_sandbox": "foo"}, "names a group"),
        ({"DOCKER_HOST": "unix:///engine", "TOOLHOST_DOCKER": "3"}, "TOOLHOST_DOCKER names a group"),
        ({"TOOLHOST_SANDBOX__ENVIRONMENT": "foo"}, "sandbox.*JSON"),
        ({"TOOLHOST_STATE_DIR__X": "foo"}, "unknown environment variable TOOLHOST_STATE_DIR__X"),
    ],
)
def test_a_variable_that_is_no_setting_s_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words) as refused:
        load()
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("value", ["3", "[1]", "'foo'"])
def test_a_value_in_the_place_of_a_group_is_not_replaced_by_a_variable_of_the_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    file = tmp_path / "toolhost.toml"
    file.write_text(f"sandbox = {value}\n")
    monkeypatch.setenv("TOOLHOST_SANDBOX__MEMORY_BYTES", str(1 << 28))
    with pytest.raises(ConfigurationError, match=r"sandbox \(from settings file .*\): must be a table"):
        load(file)


def test_the_state_directory_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOOLHOST_STATE_DIR", str(tmp_path))
    assert load().state_dir == tmp_path


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read settings file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["state_dir", "auth.tokens_file", "bubblewrap.environment_dir"])
def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, name: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = ""')
    with pytest.raises(ConfigurationError, match=rf"^{name} \(from settings file .*\): is empty"):
        load(file)


def test_settings_cannot_be_changed() -> None:
    settings = load()
    with pytest.raises(ValidationError):
        settings.server.listen = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "address"),
    [("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:8000", ("::1", 8000)), ("toolhost:1", ("toolhost", 1))],
)
def test_addresses_are_split(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["8000", ":8000", "host", "host:", "host:x", "::1:8000", "host:70000", "host:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|brackets"):
        split_address(text)


@pytest.mark.parametrize(("listen", "loopback"), [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True)])
def test_loopback_is_known(listen: str, loopback: bool) -> None:
    assert load(flags={"server": {"listen": listen}}).server.loopback is loopback
    assert not load(flags={"server": {"listen": "0.0.0.0:1"}}).server.loopback


def test_every_setting_has_a_default() -> None:
    values: dict[str, Any] = Settings().model_dump()
    assert set(values) >= {"server", "python", "sandbox", "lifecycle", "auth", "bubblewrap", "docker"}


def test_search_keys_come_from_their_usual_names_last_and_never_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXA_API_KEY", "exa-general")
    monkeypatch.setenv("TAVILY_API_KEY", "tavily-general")
    monkeypatch.setenv("BRAVE_API_KEY", "")
    monkeypatch.setenv("TOOLHOST_SEARCH__TAVILY_API_KEY", "tavily-own")
    search = load(file_with(tmp_path, '[search]\nexa_api_key = "exa-file"\n')).search
    assert search.exa_api_key is not None and search.exa_api_key.get_secret_value() == "exa-file"
    assert search.tavily_api_key is not None and search.tavily_api_key.get_secret_value() == "tavily-own"
    assert search.brave_api_key is None
    assert "exa-file" not in repr(search) and "tavily-own" not in repr(search)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[search]\nprovider = 'exa'\n", "API key"),
        ("[search]\nprovider = 'searxng'\n", "URL"),
        ("[search]\nsearxng_url = 'searx.example'\n", "http://"),
        ("[browser]\nallow_networks = ['10.0.0.0/33']\n", "browser.allow_networks"),
        ("[browser]\nports = [0]\n", "browser.ports"),
        ("[browser]\ndeny_domains = ['example.org', 'https://example.org/']\n", "browser.deny_domains"),
        ("[browser]\nallow_domains = ['example.org, docs.python.org']\n", "browser.allow_domains"),
        ("[browser]\nproxy = 'proxy:3128'\n", "browser.proxy"),
    ],
)
def test_a_browser_that_cannot_work_as_it_is_set_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str
) -> None:
    monkeypatch.delenv("EXA_API_KEY", raising=False)
    with pytest.raises(ConfigurationError) as refusal:
        registry.create(load(file_with(tmp_path, text), {"state_dir": tmp_path}))
    assert word in refusal.value.message


@pytest.mark.parametrize("written", ["127.0.0.1:8000", "http://127.0.0.1:8000"])
def test_the_client_s_url_is_taken_with_and_without_its_scheme(written: str) -> None:
    assert load(flags={"client": {"url": written}}).client.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("store", "word"),
    [
        ({"kind": "redis"}, "needs url"),
        ({"kind": "sqlite", "url": "redis://h/0"}, "has no url"),
        ({"url": "redis://h/0", "url_file": "f"}, "give one"),
        ({"kind": "paper"}, "sqlite"),
    ],
)
def test_a_store_without_its_url_or_with_two_is_refused(store: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        load(None, {"store": store})


def test_a_store_s_url_is_a_secret_and_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not load(None).store.redis
    monkeypatch.setenv("TOOLHOST_STORE__URL", "redis://:secret@127.0.0.1:1/0")
    settings = load(None)
    assert settings.store.redis
    assert "secret" not in repr(settings)
    monkeypatch.delenv("TOOLHOST_STORE__URL")
    (tmp_path / "url").write_text("redis://:secret@127.0.0.1:1/0\n")
    assert load(None, {"store": {"url_file": tmp_path / "url"}}).store.redis
