"""Frames between the host and the agent inside a sandbox: one JSON object a line, UTF-8.

Above: `sandboxes.client` on the host, `supervisor` inside. Below: the standard library (Python >= 3.11, in any image).
This file is the whole protocol; both ends import it. Nothing in it is trusted by the host beyond what `decode` checked:
user code may have broken out of the interpreter, so sizes, fields and codes are checked on the host's side.

Conversation. The host connects and sends `hello`; the agent answers `hello` or `error` and closes. Then the host sends
requests, each with an `id` that is unique on its connection; every reply carries that `id`:

    ping                                      -> ok
    claim   {ticket, session, epoch, sequence}-> ok          binds a fresh sandbox to a session; the same again is ok
    exec    {attempt, digest, kind, call, timeout, cap, queued, acked?} -> accepted, started, output*, result | error
    attach  {attempt}                         -> accepted, [started, output*,] result | error   joins or collects
    cancel  {attempt, why}                    -> ok          climbs the ladder; the result follows to who waits for it
    ack     {attempts}                        -> ok          the ledger has them: the agent may forget
    restart {}                                -> ok {epoch}  a new interpreter at once; a running execution is killed
    status  {}                                -> ok {status}
    files   {op, ...}                         -> ok | data* then ok | error      (list, get, put, remove)
    stop    {}                                -> ok, then PID 1 exits

Executions run one at a time in the order of their arrival; `exec` of a known attempt with the same digest joins it or
returns its kept result; with another digest it is the error `conflict`. Deadlines are the agent's: they hold when the
host is gone. An execution belongs to no connection: it goes on when its connection closes, and its result is kept
until `ack`. Output is sent as it appears to every connection that waits for the attempt, best effort: a slow reader
misses output frames (never a result), and the result has the whole text up to its cap. `accepted` and `started` are
left out where the result follows at once: its receipt says the same.

`hello` is {v, nonce} and may come again on the attach stream, where a new host takes over from one that went away:
the agent then drops what it had not sent, ends it with an empty line, and answers. Empty lines mean nothing, in both
directions. `claim.epoch` numbers the interpreter that runs now, `claim.sequence` is the last number that was used.
`exec` of an attempt that was acknowledged is the error `unknown`: it does not run again. `restart` is answered when the
new interpreter has been started. A connection that says nothing for 10 s before its `hello` is closed.

Fields of the replies (all required unless `?`; `null` where a value does not apply):

    hello     v, sandbox, python, state ("starting" | "idle" | "running"), claim ({ticket, session} | null), epoch,
              sequence, running (attempt | null), kept ([attempt, ...]: results not yet acknowledged), acks? (true: it
              takes `acked`)
    accepted  sequence, epoch
    started   sequence, epoch, at
    output    text
    result    receipt (the fields of sandboxes.spec.Receipt, `cause` an object or null), output and background
              ({head, tail, cut_characters, file, file_complete}; background null), value, error, images
              ([{path, mime}]), files ([{path, size}]), exit_code, notes ([sentence, ...]),
              state_lost_before? (sentence: how the interpreter before this one ended, where no result has told it)
    error     code (of ERRORS), message (for people, at most 500 characters)
    data      piece (base64)
    ok        to `restart`: epoch; to `status`: status {state, epoch, sequence, running, waiting (int), uptime_s};
              to `files`: list: files [{path, size, modified, kind ("file" | "directory" | "link" | "other")}]
              (recursive, absolute paths; hidden directories are named, not entered) and complete (bool: false when
              there are more), get and tar: size (after its data), put: size (so far)

Requests in full: exec {attempt, digest, kind ("python" | "shell"), call (the call's arguments() of sandboxes.spec),
timeout (s), cap (characters), queued (time the caller asked), acked? (as the attempts of an `ack`, which is not
answered; to an agent whose hello has `acks`)}; cancel {attempt, why ("cancel" | "operator")};
files {op: "list", path} | {op: "get", path, limit} | {op: "tar", path, limit} | {op: "put", path, upload (an id),
offset, piece (base64), last (bool)} | {op: "remove", path}; paths are relative to the data directory or absolute
below it. A put writes aside and renames at `last`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1

# Larger lines are a protocol error on either side. The host accepts less than it sends: code is bounded by the HTTP
# body (4 MiB of text, up to 6 times that as JSON escapes), and whatever an agent reports is capped by the agent.
MAX_FRAME_TO_AGENT = 32 << 20
MAX_FRAME_TO_HOST = 1 << 20
# File contents travel base64 in pieces of this many raw bytes.
FILE_PIECE = 192 << 10
# Text of one output frame, in characters.
OUTPUT_PIECE = 16 << 10
# Text of a result (output head and tail, value, traceback), in characters each; a larger `cap` is lowered to this.
MAX_CAP = 100_000

REQUESTS = frozenset(
    {"hello", "ping", "claim", "exec", "attach", "cancel", "ack", "restart", "status", "files", "stop"}
)
REPLIES = frozenset({"hello", "ok", "error", "accepted", "started", "output", "data", "result"})

# The closed list of error codes an agent may send.
ERRORS = frozenset(
    {
        "bad_frame",  # not of this protocol; the connection closes
        "bad_version",
        "refused",  # wrong nonce, or a peer from inside the sandbox
        "bad_request",  # the request's fields are wrong; nothing happened
        "claimed",  # the sandbox already belongs to another session
        "unclaimed",  # exec before claim
        "conflict",  # the attempt id is known with another digest
        "unknown",  # no such attempt (forgotten, or never seen)
        "busy",  # more executions wait than the agent queues
        "not_found",  # files: no such file
        "too_large",  # files: over the cap, or no space left
        "failed",  # the agent itself failed; the message says how
    }
)


class FrameError(ValueError):
    """A line is not a frame of this protocol."""


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class _Context:
    """What json.decoder.JSONDecoder is to its scanner."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_constant)
    memo: dict[str, str] = {}  # noqa: RUF012 - the scanner's own


def _unserializable(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not JSON")


def _codec() -> tuple[Callable[[object, int], tuple[str, ...]], Callable[[str], object]]:
    """The halves of `json` that are written in C: the package around them takes as long to import as the whole rest of
    the agent. Another implementation of Python, or a later one that moved them, gets the package."""
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner

        encoder = make_encoder(None, _unserializable, encode_basestring_ascii, None, ":", ",", False, False, False)
        scan = make_scanner(_Context())  # type: ignore[arg-type]
        "".join(encoder({"t": [1, 1.5, None, True]}, 0))
    except (ImportError, TypeError):
        import json

        plain = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        return lambda value, _level: (plain(value),), lambda text: json.loads(text, parse_constant=_constant)

    def load(text: str) -> object:
        text = text.strip(" \t\r\n")
        try:
            value, end = scan(text, 0)
        except StopIteration:
            raise ValueError("not a value") from None
        except SystemError:  # the scanner's way to fail where json.decoder, which has its exception, is not imported
            raise ValueError("not JSON") from None
        if end != len(text):
            raise ValueError("more than one value")
        return value

    return encoder, load


_encoder, _loads = _codec()


def encode(frame: dict[str, object]) -> bytes:
    """One line. ASCII only, so that a line never contains a raw newline or a lone surrogate. Raises ValueError for a
    number that JSON does not have."""
    return "".join(_encoder(frame, 0)).encode("ascii") + b"\n"


def parse(line: bytes) -> dict[str, object]:
    """The object of a line. Raises FrameError."""
    try:
        frame = _loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error.__class__.__name__}") from None
    if not isinstance(frame, dict):
        raise FrameError("not an object")
    return frame


def decode(line: bytes, kinds: frozenset[str]) -> dict[str, object]:
    """The frame of a line. Raises FrameError unless it is an object whose `t` is one of `kinds`."""
    try:  # as `parse`, and without another call: this is done for every frame
        frame = _loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error.__class__.__name__}") from None
    if type(frame) is not dict:
        raise FrameError("not an object")
    kind = frame.get("t")
    if type(kind) is not str or kind not in kinds:
        raise FrameError("unknown kind of frame")
    return frame


# --- the agent's configuration ---------------------------------------------------------------------------------------
#
# The backend starts the agent as   PYTHON -I -B -S DIR/toolhost_agent.py CONFIG   (or as else the launcher documents),
# where CONFIG is `fd:N` (read to its end, then closed), `stdin` (its length as eight digits, then so many bytes) or a
# path (read, then unlinked). It is one JSON object, and holds the nonce: user code must not be able to read it, so it
# is never an argument or in the environment.
#
#   sandbox      str    the sandbox id of the handle
#   owner        str    the owner's public id
#   nonce        str    what `hello` must show
#   channel      object {"kind": "listen_fd", "fd": n}      a listening AF_UNIX stream socket that was inherited
#                       {"kind": "listen_path", "path": p}  the agent binds it itself, mode 0600
#                       {"kind": "stdio"}                   frames on fds 0 and 1 (one host at a time)
#   peer_check   bool   accept only peers whose SO_PEERCRED pid is 0 (outside of this pid namespace)
#   data         str    the session's directory, `/mnt/data`
#   python       list   argv prefix of the interpreter, e.g. ["/usr/bin/python3"]
#   site         list   directories that user code imports packages from, before the interpreter's own
#   uid, gid     int    who user code runs as; null: the agent's own
#   environment  object variables for user code (the whole environment, with PATH and HOME)
#   preimports   list   modules the interpreter loads before it is ready
#   limits       object memory_bytes, disk_bytes, processes, open_files: see sandboxes.spec.Limits; null: not enforced
#                       by the agent. `memory_rlimit`: bool, true where no cgroup holds the memory.
#   timeout_s    float  default deadline of an execution
#   grace_s      float  the ladder's step, 2.0
#   seccomp      str    base64 of `struct sock_filter[]`: what every process is refused; empty: nothing more
#   fence_s      float  end when no host has been connected for so long; null: never
