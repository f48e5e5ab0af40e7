"""Errors of the loop. Everything a caller may have to handle derives from `LoopError`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError


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


def explained(error: ValidationError) -> RequestError:
    """Which field of a request is wrong, and why, where the response object could not be made of it.

    A tool that is wrong fails against every type of tool there is: what counts is said by the type that it claims.
    """
    found = error.errors(include_url=False, include_input=False)
    others = {one["loc"][:-1] for one in found if one["loc"][-1:] == ("type",) and _is_branch(one["loc"][-2:-1])}
    fitting = [one for one in found if not any(one["loc"][: len(other)] == other for other in others)]
    chosen = max(fitting or found[:1], key=lambda one: len(_place(one["loc"])))
    place = _place(chosen["loc"] if fitting else chosen["loc"][:2])
    why = chosen["msg"] if fitting else "it is of no known type"
    return RequestError(f"{'.'.join(place)}: {why}", place[0] if place else None)


def _place(loc: tuple[Any, ...]) -> list[str]:
    return [str(part) for part in loc if not _is_branch((part,))]


def _is_branch(part: tuple[Any, ...]) -> bool:
    """Whether this part of a path is pydantic's name for a branch of a union, and none of the request's."""
    return bool(part) and isinstance(part[0], str) and ("[" in part[0] or part[0][:1].isupper() or part[0] == "str")
