"""What namespaces that run code share: what a call's `_meta` may ask for, and an outcome as a result.

Above: `python`, `container`. Below: sandboxes' public API, `render`.
"""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from sandboxes.errors import SandboxError
from sandboxes.spec import Outcome
from toolhost.config import PythonSettings
from toolhost.errors import BadArguments
from toolhost.namespaces.base import CallContext, Image, Link, ToolResult
from toolhost.namespaces.render import receipt_meta, render

ATTEMPT_ID = "toolhost/attempt-id"
TIMEOUT = "toolhost/timeout"
RECEIPT = "toolhost/receipt"
ATTEMPT_CHARACTERS = 128
IMAGE_BYTES = 4 << 20  # of one image sent along; a larger one is named in the text only
IMAGES = 8


def attempt_id_of(meta: Mapping[str, Any]) -> str:
    """The attempt id that a caller minted, "" when it sent none. Raises BadArguments."""
    value = meta.get(ATTEMPT_ID, "")
    if not isinstance(value, str) or len(value) > ATTEMPT_CHARACTERS or not value.isprintable() or "/" in value:
        raise BadArguments(
            f"_meta {ATTEMPT_ID} must be a string of at most {ATTEMPT_CHARACTERS} printable characters without '/'. "
            "Nothing ran."
        )
    return value


def timeout_of(meta: Mapping[str, Any], settings: PythonSettings) -> float:
    """Seconds that a call may take: what the client asks for, within the operator's bound. Raises BadArguments."""
    value = meta.get(TIMEOUT)
    return settings.timeout_s if value is None else bounded(value, f"_meta {TIMEOUT}", settings)


def bounded(value: object, name: str, settings: PythonSettings) -> float:
    """A number of seconds that was sent as `name`, within the operator's bound. Raises BadArguments."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise BadArguments(f"{name} must be a positive number of seconds. Nothing ran.")
    return min(float(value), settings.max_timeout_s)


def uri_of(path: str) -> str:
    """The resource URI of a file in the sandbox."""
    return f"file://{quote(path)}"


def mime_of(path: str) -> str:
    return mimetypes.guess_type(path, strict=False)[0] or "application/octet-stream"


async def result_of(outcome: Outcome, context: CallContext) -> ToolResult:
    """An outcome as a result: text for everybody, images and links for clients that take them."""
    receipt = receipt_meta(outcome.receipt)
    meta = {RECEIPT: receipt}
    if not context.rich:
        return ToolResult(render(outcome), meta=meta)
    links = [
        Link(uri_of(file.path), file.path.rpartition("/")[2] or file.path, mime_of(file.path), file.size)
        for file in outcome.files
    ]
    text = render(outcome)
    # Clients that prefer structured content show the model nothing else: the text must be in it.
    structured: dict[str, Any] = {"text": text, "receipt": receipt}
    if outcome.exit_code is not None:
        structured["exit_code"] = outcome.exit_code
    return ToolResult(text, meta=meta, images=await _images(outcome, context), links=links, structured=structured)


async def _images(outcome: Outcome, context: CallContext) -> list[Image]:
    images = []
    for reference in outcome.images[:IMAGES]:
        try:
            data = await context.attachment.read_file(reference.path, IMAGE_BYTES)
        except SandboxError:
            continue  # the text names it: a missing or oversized image loses nothing else
        images.append(Image(data, reference.mime))
    return images
