"""Which addresses may be fetched: asked about a URL before a request and about the socket's address as it connects.

The second question is the one that counts. A name is resolved by then, so redirects, DNS rebinding and odd spellings of
an address all arrive here as the number that would be connected to.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from yarl import URL

from toolhost.browsing.errors import AddressRefused, FetchError
from toolhost.browsing.links import MAX_URL, shown_host
from toolhost.search.base import Filters

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressInfo = tuple[Any, ...]

DEFAULT_PORTS = frozenset({80, 443, 8080, 8443})

# IANA IPv4 Special-Purpose Address Registry and multicast (RFC 5771), and one public address that is a cloud's inside.
_REFUSED_4 = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",  # Azure's WireServer
    )
)
# Only global unicast (RFC 4291) is the public Internet; within it these are not (IANA IPv6 registry). IPv4-mapped
# (::ffff:0:0/96), NAT64 (64:ff9b::/96), link-local and unique local addresses lie outside of it.
_GLOBAL_6 = ipaddress.ip_network("2000::/3")
_REFUSED_6 = tuple(
    ipaddress.ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)


class Guard:
    """The rules of one host.

    Args:
        allow_networks: Networks permitted although they are not public (an intranet the operator names).
        ports: Ports permitted.
    """

    def __init__(self, *, allow_networks: Iterable[Network] = (), ports: Iterable[int] = DEFAULT_PORTS) -> None:
        self._allow = tuple(allow_networks)
        self._ports = frozenset(ports)

    def check_address(self, text: str) -> None:
        """Raises AddressRefused unless the address (a socket's, perhaps with a scope) may be connected to."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise AddressRefused(f"`{text}` is not an address") from None
        if any(address in network for network in self._allow if network.version == address.version):
            return
        if not is_public(address):
            # The text names no address: a resolver's inside answers are nobody's business, and one text for all
            # addresses of a name lets the connector pass the refusal on unchanged.
            raise AddressRefused("its address is not on the public Internet")

    def check_url(self, url: str, filters: Filters) -> URL:
        """The URL as it will be requested: no credentials, no fragment.

        Raises:
            FetchError: a scheme, port, host or domain that is not permitted; AddressRefused for an address.
        """
        if len(url) > MAX_URL:
            raise FetchError(f"the URL is longer than {MAX_URL} characters")
        if any(ord(character) < 33 or character == "\\" for character in url):
            raise FetchError("the URL has a space, a backslash or a control character in it; quote it")
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise FetchError(f"only http and https can be opened, not `{shown_host(scheme)}:`")
        try:
            target = URL(url)
            host, port = target.host, target.port
            urlsplit(url).port  # noqa: B018 - raises for what yarl lets pass
        except ValueError as error:
            raise FetchError(f"not a URL: {error}") from error
        if not host:
            raise FetchError("the URL names no host")
        target = target.with_user(None).with_fragment(None)
        if port not in self._ports:
            allowed = ", ".join(map(str, sorted(self._ports)))
            raise FetchError(f"port {port} is not permitted; permitted are {allowed}")
        if not filters.permits(host):
            raise FetchError(f"the domain {shown_host(host)} is not permitted here")
        self._check_literal(host)
        return target

    def _check_literal(self, host: str) -> None:
        """Refuse early, with a clear reason, what is an address already, however it is spelled."""
        address = literal_address(host)
        if address is not None:
            self.check_address(address)

    def socket_factory(self) -> Callable[[AddressInfo], socket.socket]:
        """For aiohttp's connector: makes the socket of an address about to be connected to, or refuses."""

        def make(info: AddressInfo) -> socket.socket:
            family, kind, protocol, _, address = info
            self.check_address(address[0])
            made = socket.socket(family=family, type=kind, proto=protocol)
            made.setblocking(False)
            return made

        return make


def is_public(address: Address) -> bool:
    """Whether an address is on the public Internet. Forms that carry another address inside are not."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _REFUSED_4)
    if address.scope_id is not None or address not in _GLOBAL_6:
        return False
    return not any(address in network for network in _REFUSED_6)


def literal_address(host: str) -> str | None:
    """The address a host text is, in any spelling the C library understands (`0x7f.1`, `2130706433`), or None."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
    except (OSError, UnicodeError):
        return None
