"""A tool's result as the loop keeps it, read from whatever a session returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECEIPT_META_KEY = "toolhost/receipt"
EMPTY = "The tool returned nothing."


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`text` is whole and never empty; `images` are data URLs; `receipt` is the host's, if it sent one."""

    text: str
    is_error: bool = False
    images: tuple[str, ...] = ()
    receipt: Mapping[str, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """What identifies the content: two results with equal data are the same result."""
        return {"text": self.text, "is_error": self.is_error, "images": list(self.images)}


def read_result(value: Any) -> ToolResult:
    """Read an MCP result (of either major SDK version), a plain string, or a `ToolResult`."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value or EMPTY)
    texts: list[str] = []
    images: list[str] = []
    for block in getattr(value, "content", None) or ():
        match getattr(block, "type", None):
            case "text":
                texts.append(block.text)
            case "image":
                media = getattr(block, "mime_type", None) or getattr(block, "mimeType", "image/png")
                images.append(f"data:{media};base64,{block.data}")
            case "resource_link":
                texts.append(f"[{getattr(block, 'name', '')}]({block.uri})")
            case "resource" if getattr(block.resource, "text", None) is not None:
                texts.append(block.resource.text)
    failed = bool(getattr(value, "is_error", False) or getattr(value, "isError", False))
    meta = getattr(value, "meta", None) or {}
    receipt = meta.get(RECEIPT_META_KEY)
    text = "\n".join(text for text in texts if text) or EMPTY
    return ToolResult(text, failed, tuple(images), receipt if isinstance(receipt, Mapping) else {})


def excerpt(text: str, limit: int) -> str:
    """Head and tail of a text longer than `limit` characters, with the count of what was left out between."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit} characters left out …]\n{text[-tail:]}"
