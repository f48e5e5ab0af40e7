"""Frozen settings, from flags, the environment and one TOML file. Nothing else here reads the environment.

Above: everything that is built from settings. Below: pydantic.
Precedence: flags, then `TOOLHOST_GROUP__NAME` variables, then the file. Unknown names are refused in all of them.
Durations end in `_s` (seconds), sizes in `_bytes`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from toolhost.errors import ConfigurationError

PREFIX = "TOOLHOST_"
SEARCH_KEYS = {
    f"{name}_api_key": f"{name.upper()}_API_KEY" for name in ("exa", "tavily", "brave")
}  # as services name them
Seconds = Annotated[float, Field(gt=0, le=366 * 86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
PathPrefix = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")]


def _named(place: object) -> object:
    if place == "":  # of a shell variable that is not set, say: a Path would make the working directory of it
        raise ValueError("is empty: name a path")
    return place


Place = Annotated[Path, BeforeValidator(_named)]


class Group(BaseModel):
    """One table of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Group):
    """Where the host listens and what it says of itself."""

    listen: str = Field("127.0.0.1:8000", description="HOST:PORT; [::1]:8000 for IPv6; port 0 takes a free one")
    root_path: PathPrefix = Field("", description="path prefix under which a proxy serves this host")
    public_path: PathPrefix = Field("", description="prefix put in the endpoint event instead of root_path")
    root_namespace: str = Field("python", description="the namespace of bare /sse")
    allowed_hosts: tuple[str, ...] | None = Field(None, description="Host headers to accept; none: any off loopback")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest JSON-RPC message")
    ping_s: float = Field(10.0, gt=0, le=15, description="a comment on idle streams at least this often")
    shutdown_s: Seconds = Field(20.0, description="bound of a graceful stop")
    max_calls: Count = Field(32, description="calls in flight on one connection")
    max_connections: Count = Field(10_000, description="SSE streams at once; a request of vLLM has one a namespace")
    max_connections_per_principal: Count = Field(5_000, description="of them, one principal's")
    max_file_bytes: int = Field(1 << 30, ge=1, description="largest file or archive, up or down")

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        split_address(value)
        return value

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return split_address(self.listen)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.address[0])


class LogSettings(Group):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, else JSON lines")


class PythonSettings(Group):
    """What the python namespace does with a call."""

    timeout_s: Seconds = Field(120.0, description="a call's time, from when its code starts")
    max_timeout_s: Seconds = Field(600.0, description="the most that a client may ask for")
    max_characters: int = Field(20_000, ge=200, description="longer output is cut in the middle")
    instructions: str | None = Field(None, description="replaces the prompt text")
    preimports: tuple[str, ...] = Field((), description="modules loaded before an interpreter is ready")


DOMAIN = re.compile(r"(\*?\.)?[\w-]+(\.[\w-]+)*\.?")
"""A host name as lists of domains have it."""


class BrowserSettings(Group):
    """What the browser may open and how much it keeps to."""

    web: bool = Field(True, description="open pages of the Internet; false: what the corpus has, only")
    deadline_s: Seconds = Field(60.0, description="a page's time: fetching, retries, turning it into text")
    allow_domains: tuple[str, ...] = Field((), description="only these and their subdomains; none: all")
    deny_domains: tuple[str, ...] = Field((), description="never these and their subdomains")
    only_seen: bool = Field(False, description="open only URLs that a search or a page of the session showed")
    allow_networks: tuple[IPvAnyNetwork, ...] = Field((), description="networks that are permitted though not public")
    ports: tuple[Port, ...] = Field((80, 443, 8080, 8443), description="ports that may be connected to")
    proxy: str | None = Field(None, description="http://HOST:PORT for all pages; its address must be permitted")
    max_page_bytes: int = Field(20 << 20, ge=1024, description="of one page, decompressed")
    vocabulary_dir: Place | None = Field(None, description="folder with o200k_base.tiktoken, for exact page windows")
    instructions: str | None = Field(None, description="replaces the prompt text")

    @field_validator("allow_domains", "deny_domains")
    @classmethod
    def _domains(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """A URL, for instance, would match no host: a list of what is denied would deny nothing."""
        for domain in value:
            if not DOMAIN.fullmatch(domain.strip()):
                raise ValueError(f"{domain!r} is not a host name like example.org or *.example.org")
        return value

    @field_validator("proxy")
    @classmethod
    def _proxy(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", value):
            raise ValueError("must be like http://HOST:PORT")
        return value


class SearchSettings(Group):
    """Where search results come from. Keys are also taken from EXA_API_KEY, TAVILY_API_KEY and BRAVE_API_KEY."""

    provider: Literal["auto", "exa", "tavily", "brave", "searxng", "ddgs", "corpus"] = "auto"
    exa_api_key: SecretStr | None = None
    tavily_api_key: SecretStr | None = None
    brave_api_key: SecretStr | None = None
    searxng_url: str | None = Field(None, description="an instance of yours, for example http://searx.example:8888")
    keyless: bool = Field(False, description="permit online search without a key (the extra ddgs)")
    deadline_s: Seconds = Field(30.0, description="a search's time, all providers and retries together")
    corpus_file: Place | None = Field(None, description="the corpus' index; none: corpus.sqlite in state_dir")

    @field_validator("searxng_url")
    @classmethod
    def _searxng_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value


class SandboxSettings(Group):
    """What isolates, and what one sandbox may use."""

    backend: Literal["auto", "bubblewrap", "docker", "ray"] = "auto"
    memory_bytes: int = Field(1 << 30, ge=64 << 20)
    cpus: float = Field(1.0, gt=0)
    processes: int = Field(256, ge=16)
    disk_bytes: int = Field(2 << 30, ge=1 << 20)
    tmp_bytes: int = Field(128 << 20, ge=1 << 20)
    shm_bytes: int = Field(64 << 20, ge=1 << 20)
    open_files: int = Field(1024, ge=64)
    egress: str = Field("none", description="none, or a network that the backend knows")
    environment: dict[str, str] = Field(default_factory=dict, description="variables for user code")


class LifecycleSettings(Group):
    """How long sessions live and how many there may be."""

    idle_s: Seconds = 20 * 60
    lifetime_s: Seconds = 24 * 3600
    grace_s: Seconds = Field(30.0, description="a request's session outlives a lost connection by this")
    fence_s: Seconds = Field(24 * 3600, description="a sandbox ends itself when no host came for so long")
    max_ttl_s: Seconds = Field(24 * 3600, description="the most that x-toolhost-ttl may ask for")
    max_sessions: Count | None = Field(None, description="sandboxes at once; none: what the memory allows")
    max_sessions_per_principal: Count | None = None
    max_queue: int = Field(64, ge=0, description="calls that may wait for a place")
    queue_s: Seconds = Field(30.0, description="the longest wait for a place")
    pool: int = Field(0, ge=0, description="warm sandboxes kept ready")
    on_stop: Literal["keep", "close"] = Field("keep", description="what a stop does with retained sandboxes")


class StoreSettings(Group):
    """Where sessions and receipts are kept: with several tool hosts over one cluster, in a Redis that they share."""

    kind: Literal["auto", "sqlite", "redis"] = Field("auto", description="auto: redis when there is a url for it")
    url: SecretStr | None = Field(None, description="redis://:PASSWORD@HOST:PORT/0, or rediss:// with TLS")
    url_file: Place | None = Field(None, description="a file with nothing but the url")
    prefix: str = Field("toolhost:", min_length=1, max_length=64, description="of all keys in Redis")

    @model_validator(mode="after")
    def _one_url(self) -> StoreSettings:
        given = (self.url is not None) + (self.url_file is not None)
        if given > 1:
            raise ValueError("url and url_file are two ways to say one thing: give one")
        if self.kind == "redis" and not given:
            raise ValueError('kind = "redis" needs url (TOOLHOST_STORE__URL) or url_file')
        if self.kind == "sqlite" and given:
            raise ValueError('kind = "sqlite" has no url: it is a file in state_dir')
        return self

    @property
    def redis(self) -> bool:
        """Whether it is a Redis server; else a file in the state directory."""
        return self.url is not None or self.url_file is not None


class AuthSettings(Group):
    """Who may connect."""

    tokens_file: Place | None = Field(None, description="lines NAME:SCOPES:SHA256, see `toolhost tokens`")
    insecure: bool = Field(False, description="serve beyond this machine without tokens")
    retained_keys: Literal["random", "any"] = Field("random", description="off loopback: long random keys, or any")
    failures_per_minute: Count = 30


class TelemetrySettings(Group):
    """What is measured. Metrics are always there, at /metrics."""

    traces: bool = Field(False, description="spans by OpenTelemetry; its own OTEL_ variables say where to")
    service_name: str = Field("toolhost", description="how traces name this host")


class ClientSettings(Group):
    """How commands for operators find a host that runs. A host itself does not read these."""

    url: str | None = Field(None, description="http://HOST:PORT/PREFIX; none: what server.listen says")
    token: SecretStr | None = None
    token_file: Place | None = Field(None, description="a file with nothing but the token")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            value = f"http://{value}"
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value


class BubblewrapSettings(Group):
    environment_dir: Place | None = Field(None, description="what `toolhost setup` made; none: where it makes it")


class DockerSettings(Group):
    image: str | None = Field(None, description="the sandbox image; none: the one that `toolhost setup` builds")
    runtime: str | None = Field(None, description="runc, runsc or kata; none: the engine's default")
    host: str | None = Field(None, description="the engine's address; none: DOCKER_HOST, else this machine's")
    networks: tuple[str, ...] = Field((), description="the engine's networks that sandbox.egress may name")
    channel: Literal["auto", "socket", "attach"] = Field("auto", description="how the host and an agent talk")


class RaySettings(Group):
    """Sessions on the nodes of a Ray cluster (sandbox.backend = "ray"). Paths are the same on every node."""

    address: str = Field("auto", description="HOST:PORT of the head; auto: the cluster of the Ray node that runs here")
    token_file: Place | None = Field(None, description="Ray's token; none: cluster/token in state_dir if it is there")
    owner_file: Place | None = Field(None, description="the owner's id and secret, on all nodes; none: in state_dir")
    local: Literal["bubblewrap", "docker"] = Field("bubblewrap", description="what isolates on each node")
    node_state_dir: Place | None = Field(None, description="where nodes keep files; none: state_dir")
    relay_host: str = Field("", description="the address that nodes' relays bind; none: the one Ray knows a node by")
    relay_port: int = Field(0, ge=0, le=65535, description="their port; 0: a free one, kept over restarts")
    fence_s: float = Field(5.0, ge=2, le=600, description="a sandbox ends itself without its NodeHost for so long")
    unused_s: float = Field(60.0, ge=5, le=86400, description="a lease in which nothing was started is given back")
    head_patience_s: float = Field(300.0, ge=30, description="without the head for so long a node ends its sandboxes")


class GatewaySettings(Group):
    """The Responses gateway."""

    enabled: bool = Field(False, description="`toolhost serve` serves /v1/responses too")
    model_url: str | None = Field(None, description="the model server, up to /v1")
    dialect: Literal["chat", "responses", "anthropic"] = Field("chat", description="what the model server speaks")
    model: str | None = Field(None, description="the model for requests that name none; none: the server's first")
    api_key_file: Place | None = Field(None, description="a file with the model server's key")
    tools: tuple[str, ...] = Field((), description="HOST:PORT/namespace or MCP URLs")
    remote_servers: tuple[str, ...] = Field((), description="URLs that mcp tools of requests may name, as prefixes")
    store: str | None = Field(None, description="sqlite:///FILE or redis://HOST:PORT/0; none: a file in state_dir")
    keys_file: Place | None = Field(None, description="Fernet keys that exist, newest first; none: made in state_dir")
    ttl_s: Seconds = Field(30 * 86400, description="responses and chains are kept this long after their last change")
    session_ttl_s: Seconds = Field(3600, description="a chain's sandbox is kept this long after its last use")
    lease_s: Seconds = Field(15.0, description="a gateway that is silent for so long has died")
    max_background: Count = Field(64, description="background responses that run at once; the others are queued")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="largest request body")
    deadline_s: Seconds = Field(3600.0, description="the longest that a response may take")
    max_rounds: Count = Field(20, description="model rounds of a response")
    images: bool = Field(False, description="the model sees images: those in tool output are shown to it")
    context_tokens: Annotated[int, Field(ge=256)] | None = Field(None, description="the model's context; none: unknown")


class _Environment(EnvSettingsSource):
    """The environment, with unknown `TOOLHOST_` names refused like unknown keys of the file."""

    def __call__(self) -> dict[str, Any]:
        for name, value in os.environ.items():
            upper = name.upper()
            if upper.startswith(PREFIX) and not upper.startswith(
                f"{PREFIX}TEST_"
            ):  # this project's own tests' are none
                self._check(name, value)
        try:
            values = super().__call__()
        except SettingsError as error:
            raise ConfigurationError(f"in the environment: {error} (lists and tables are written as JSON)") from None
        if engine := os.environ.get("DOCKER_HOST"):  # as every client of the engine reads it
            values.setdefault("docker", {}).setdefault("host", engine)
        return values

    def _check(self, name: str, value: str) -> None:
        fields = self.settings_cls.model_fields
        group, _, setting = name[len(PREFIX) :].partition("__")
        known = fields.get(group.lower())
        is_group = known is not None and isinstance(known.default, Group)
        if known is None or (setting and not is_group):
            raise ConfigurationError(
                f"unknown environment variable {name}; variables are {PREFIX}GROUP__NAME with GROUP one of "
                f"{', '.join(sorted(field.upper() for field in fields))}"
            )
        if is_group and not setting and value:
            raise ConfigurationError(f"environment variable {name} names a group; set {name}__NAME, a setting of it")


class Settings(BaseSettings):
    """Everything that can be set. Made once by `load`, then only read."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True
    )

    state_dir: Place = Field(default_factory=lambda: default_state_dir(), description="ledger, owner secret, files")
    server: ServerSettings = ServerSettings()  # type: ignore[call-arg]
    log: LogSettings = LogSettings()  # type: ignore[call-arg]
    python: PythonSettings = PythonSettings()  # type: ignore[call-arg]
    browser: BrowserSettings = BrowserSettings()  # type: ignore[call-arg]
    search: SearchSettings = SearchSettings()  # type: ignore[call-arg]
    sandbox: SandboxSettings = SandboxSettings()  # type: ignore[call-arg]
    lifecycle: LifecycleSettings = LifecycleSettings()  # type: ignore[call-arg]
    store: StoreSettings = StoreSettings()  # type: ignore[call-arg]
    auth: AuthSettings = AuthSettings()  # type: ignore[call-arg]
    telemetry: TelemetrySettings = TelemetrySettings()  # type: ignore[call-arg]
    client: ClientSettings = ClientSettings()  # type: ignore[call-arg]
    bubblewrap: BubblewrapSettings = BubblewrapSettings()  # type: ignore[call-arg]
    docker: DockerSettings = DockerSettings()  # type: ignore[call-arg]
    ray: RaySettings = RaySettings()  # type: ignore[call-arg]
    gateway: GatewaySettings = GatewaySettings()  # type: ignore[call-arg]

    @property
    def environment_dir(self) -> Path:
        """Where the embedded sandbox environment is."""
        return self.bubblewrap.environment_dir or default_environment_dir()

    @property
    def corpus_file(self) -> Path:
        """Where the index of the corpus is."""
        return self.search.corpus_file or self.state_dir / "corpus.sqlite"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def default_state_dir() -> Path:
    """Where state is kept unless a setting says otherwise (XDG)."""
    import platformdirs

    return platformdirs.user_state_path("toolhost")


def default_environment_dir() -> Path:
    """Where `toolhost setup` makes the embedded environment unless told otherwise (XDG)."""
    import platformdirs

    return platformdirs.user_data_path("toolhost") / "environment"


def load(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from flags over environment over file. `flags`: nested as the groups are; None values are left out.

    Raises ConfigurationError naming the setting, where it was set, and what is wrong with it.
    """
    merged: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for origin, values in (
        ("the environment", _search_keys()),  # the least: these variables are not only ours
        (f"settings file {file}", _read_file(file)),
        ("the environment", _Environment(Settings)()),
        ("the command line", _without_none(flags or {})),
    ):
        _merge(merged, values, origin, origins)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, origins)) from None


def proxies(host: str = "localhost") -> dict[str, str]:
    """Proxy variables that apply to plain http to a host of that name, by name (`http_proxy`, `all_proxy`)."""
    names = {name: value for name, value in os.environ.items() if name.lower() in ("http_proxy", "all_proxy") and value}
    if names and urllib.request.proxy_bypass(host):
        return {}
    return names


def vllm_labels() -> frozenset[str]:
    """The MCP labels that a vLLM started from here would treat as tools of the system prompt."""
    return frozenset(filter(None, os.environ.get("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "").split(",")))


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT (for example 0.0.0.0:8000 or [::]:8000)")
    if ":" in host and not bracketed:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:8000")
    return (host[1:-1] if bracketed else host), int(port)


def is_loopback(host: str) -> bool:
    """Whether a bind to this host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _search_keys() -> dict[str, Any]:
    keys = {field: os.environ[variable] for field, variable in SEARCH_KEYS.items() if os.environ.get(variable)}
    return {"search": keys} if keys else {}


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"settings file {file} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot read settings file {file}: {error.strerror or error}") from None


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            if inner := _without_none(value):
                kept[name] = inner
        elif value is not None:
            kept[name] = value
    return kept


def _merge(
    into: dict[str, Any],
    values: Mapping[str, Any],
    origin: str,
    origins: dict[tuple[str, ...], str],
    path: tuple[str, ...] = (),
) -> None:
    for name, value in values.items():
        here = (*path, name)
        before = origins.get(here, origin)
        origins[here] = origin
        if isinstance(value, Mapping):
            if not isinstance(into.get(name, {}), dict):
                raise ConfigurationError(
                    f"{'.'.join(here)} (from {before}): must be a table of settings, not {into[name]!r:.80}"
                )
            _merge(into.setdefault(name, {}), value, origin, origins, here)
        else:
            into[name] = value


def _explain(error: ValidationError, origins: Mapping[tuple[str, ...], str]) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        path = tuple(str(part) for part in problem["loc"])
        origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "defaults")
        message = "unknown setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{'.'.join(path)} (from {origin}): {message.removeprefix('Value error, ')}")
    return "; ".join(lines)
