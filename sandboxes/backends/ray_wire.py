"""How a tool host and a node's relay know each other, and the frames of a control connection.

Above: `ray_relay` (the node's end), `ray_peer` (the tool host's end). Below: `owner`, the standard library.

The node speaks first: a line with a challenge that is used once. The tool host answers with a header that is signed
over the challenge, the node with a line that is signed over the header. The keys come from the owner's secret: one for
control, one for every sandbox, so that what leaks of one sandbox opens no other. No secret is ever sent, and what was
recorded once is of no use again. The bytes that follow are not encrypted: the network between the nodes is trusted not
to be read, as Ray's own is.
"""

from __future__ import annotations

import hmac
import json
import secrets
from hashlib import sha256
from typing import Any

from sandboxes.errors import (
    BackendError,
    EngineUnavailable,
    EnvironmentMissing,
    IsolationUnavailable,
    NoCapacity,
    NodeGone,
    SandboxError,
    StateLost,
)
from sandboxes.owner import Owner

VERSION = 1
MAX_LINE = 4096  # of a handshake
MAX_REQUEST = 4 << 20  # a spec's variables and pre-imports
MAX_REPLY = 32 << 20  # a node's sandboxes
CONTROL = "control"
ATTACH = "attach"


class Refused(Exception):
    """The other end does not know the secret, or does not speak this protocol."""


def key(owner: Owner, op: str, sandbox_id: str) -> bytes:
    """The key of a control connection, or of one to a sandbox's agent."""
    return bytes.fromhex(owner.relay_key(op, sandbox_id if op == ATTACH else ""))


def challenge() -> str:
    return secrets.token_hex(16)


def greeting(number: str) -> bytes:
    """The node's first line."""
    return _line({"v": VERSION, "challenge": number})


def read_greeting(line: bytes) -> str:
    """Raises Refused."""
    fields = _fields(line)
    number = fields.get("challenge")
    if fields.get("v") != VERSION:
        raise Refused(f"the node speaks version {fields.get('v')!r:.20} of the relay's protocol, and this is {VERSION}")
    if not isinstance(number, str) or len(number) != 32:
        raise Refused("the node sent no challenge")
    return number


def signed(mac_key: bytes, number: str, fields: dict[str, Any]) -> bytes:
    """A line: the signature, a space, the fields."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return _mac(mac_key, number, body).encode() + b" " + body + b"\n"


def split(line: bytes) -> tuple[str, bytes, dict[str, Any]]:
    """The signature, which nobody has checked yet, the signed bytes, and the fields. Raises Refused."""
    mac, space, body = line.rstrip(b"\n").partition(b" ")
    if not space or len(mac) != 64 or not mac.isascii():
        raise Refused("a line without a signature")
    return mac.decode(), body, _fields(body)


def check(mac: str, mac_key: bytes, number: str, body: bytes) -> None:
    """Raises Refused."""
    if not hmac.compare_digest(mac.encode(), _mac(mac_key, number, body).encode()):
        raise Refused("the signature is wrong")


def frame(fields: dict[str, Any]) -> bytes:
    """One frame of a control connection: a line of JSON."""
    return _line(fields)


def _mac(mac_key: bytes, number: str, body: bytes) -> str:
    return hmac.new(mac_key, number.encode() + b"\0" + body, sha256).hexdigest()


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise Refused("not a line of the relay's protocol") from None
    if not isinstance(fields, dict):
        raise Refused("not a line of the relay's protocol")
    return fields


# --- errors across the wire ----------------------------------------------------------------------------------------


class Draining(BackendError):
    """The node takes no new sessions."""


class NotReady(EngineUnavailable):
    """The node's process has just started and will answer in a moment."""


class NotAdmitted(EngineUnavailable):
    """The cluster does not take this machine as it is: another token, other versions. To try again changes nothing."""


class LeaseGone(BackendError):
    """The lease was given back while somebody was about to use it: it must be asked for again."""


ERRORS: dict[str, type[SandboxError]] = {
    kind.__name__: kind
    for kind in (
        BackendError,
        Draining,
        EngineUnavailable,
        EnvironmentMissing,
        IsolationUnavailable,
        LeaseGone,
        NoCapacity,
        NodeGone,
        NotAdmitted,
        NotReady,
        StateLost,
    )
}


def error_fields(error: SandboxError) -> dict[str, Any]:
    """An error as the wire has it: the nearest of those that both ends know."""
    name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), BackendError.__name__)
    return {"error": name, "message": error.message[:2000]}


def read_error(fields: dict[str, Any]) -> SandboxError:
    """The inverse of `error_fields`."""
    kind = ERRORS.get(str(fields.get("error")), EngineUnavailable)
    return kind(str(fields.get("message", ""))[:2000])
