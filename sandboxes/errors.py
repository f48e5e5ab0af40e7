"""One root for every error of this package, with the ids of what it is about.

Above: everything here; `toolhost.errors` has the one table from these to texts, MCP and HTTP. Below: nothing.
A message says what is wrong and, where somebody can act, what to do. It never contains code, output or secrets.
"""

from __future__ import annotations


class SandboxError(Exception):
    """The root. Ids are empty where they do not apply."""

    def __init__(self, message: str, *, session: str = "", sandbox: str = "", attempt: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.session = session
        self.sandbox = sandbox
        self.attempt = attempt


# --- raised by backends --------------------------------------------------------------------------------------------


class BackendError(SandboxError):
    """A backend could not do what was asked."""


class IsolationUnavailable(BackendError):
    """Nothing here can isolate (no bubblewrap, no user namespaces, no engine). The message says what to install."""


class EnvironmentMissing(BackendError):
    """What sandboxes run in (the embedded environment, the image) is not there. The message names `toolhost setup`."""


class EngineUnavailable(BackendError):
    """The engine does not answer, or not within the operation's deadline. Trying again later may work."""


class NoCapacity(BackendError):
    """The backend or the host has no room. `retry_after_s`: when it is worth trying again."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0, session: str = "", sandbox: str = "") -> None:
        super().__init__(message, session=session, sandbox=sandbox)
        self.retry_after_s = retry_after_s


class StateLost(BackendError):
    """The sandbox is gone, or another instance answers in its place: variables are lost."""


class NodeGone(StateLost):
    """The node that ran the sandbox is gone, and with it variables and files."""


class SandboxOutOfMemory(StateLost):
    """The sandbox is gone because it had used all of its memory."""


# --- raised by the wire and the client -----------------------------------------------------------------------------


class WireError(SandboxError):
    """A frame was not of the protocol: too large, not JSON, a missing or mistyped field, an unknown code."""


class ChannelLost(SandboxError):
    """The byte stream to an agent ended or stalled. What ran may still run: its attempt can be collected."""


class ChannelStalled(ChannelLost):
    """The stream is open and an answer did not come within its bound."""


# --- raised by sessions --------------------------------------------------------------------------------------------


class CallRefused(SandboxError):
    """This call cannot run as it is; the message tells the model or the client how to correct it."""


class FileMissing(CallRefused):
    """There is no such file in the session."""


class FileTooLarge(CallRefused):
    """A file is over the cap that the caller set, or the session has no room for it."""


class AttemptConflict(SandboxError):
    """This attempt id was used before with other arguments. Nothing ran."""


class AttemptExpired(SandboxError):
    """This attempt ran once, and its result is no longer kept. It is not run again."""


class AttemptUnknown(SandboxError):
    """No attempt of this id is known in this session."""


class SessionUnknown(SandboxError):
    """No session of this key is known."""


class IllegalTransition(SandboxError):
    """A session was asked to go where its state does not lead. `history`: what happened to it, oldest first."""

    def __init__(self, message: str, *, history: tuple[str, ...] = (), session: str = "") -> None:
        super().__init__(message, session=session)
        self.history = history


# --- raised by stores ----------------------------------------------------------------------------------------------


class StoreConflict(SandboxError):
    """A compare-and-set found another value than the expected one."""


class SessionHeld(StoreConflict):
    """Another replica that lives has this session in use."""


class StoreUnavailable(SandboxError):
    """The store cannot be written or read (disk full, locked, damaged)."""
