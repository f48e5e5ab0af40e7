"""Errors of the loop. Everything a caller may have to handle derives from `LoopError`."""

from __future__ import annotations


class LoopError(Exception):
    """Root of the loop's errors."""


class RequestError(LoopError):
    """The request cannot be run as it is; nothing was started.

    `param` names the offending field, so that an HTTP layer can answer with a 400 that says where.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ApprovalError(RequestError):
    """An approval id that is unknown, was already used, or belongs to someone else."""

    def __init__(self, approval_id: str) -> None:
        # One text for all three: an id's existence is not for strangers to learn.
        super().__init__(f"approval request {approval_id!r} is not open", "input")
        self.approval_id = approval_id


class ModelError(LoopError):
    """The model's server failed, refused the request or broke off.

    `code` is one of the Responses API's error codes, or "model_not_found"; `status` the HTTP status of a refusal.
    """

    def __init__(self, message: str, code: str = "server_error", status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class ToolError(LoopError):
    """A tool call that gave no result, for a reason that the text gives to the model."""


class ToolServerGone(ToolError):
    """The connection to a tool server broke while a call was running; whether the call took effect is not known."""


class IllegalOrder(LoopError):
    """An event was asked for that the protocol does not allow at this point: a defect of the caller."""
