"""Errors of the API, in the shape that OpenAI's clients read.

Above: everything in this package. Below: nothing.
"""

from __future__ import annotations

from typing import Any

from toolhost.loop.errors import ModelError, RequestError


class ApiError(Exception):
    """A request that is answered with an error object. `param` names the offending field, `code` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def as_body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def kind(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case 403:
                return "permission_error"
            case 429:
                return "rate_limit_error"
            case status if status >= 500:
                return "server_error"
        return "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def of_loop(error: RequestError) -> ApiError:
    """What the loop refused to start."""
    return bad_request(str(error), error.param)


def of_model(error: ModelError) -> ApiError | None:
    """A model server's refusal as the client's own mistake; None where it is not the client's."""
    match error.status, error.code:
        case 400 | 404, "model_not_found":
            return ApiError(404, str(error), param="model", code=error.code)
        case 400 | 413 | 422, code:
            return bad_request(str(error), code=code)
        case 429, code:
            return ApiError(429, str(error), code=code)
    return None


def not_found(what: str, ident: str) -> ApiError:
    # One text for what never was, what is over and what is another's: an id's existence is not for strangers to learn.
    return ApiError(404, f"{what} with id '{ident}' not found.", code=f"{what.lower()}_not_found")


def previous_not_found(ident: str) -> ApiError:
    return ApiError(
        400,
        f"Previous response with id '{ident}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
