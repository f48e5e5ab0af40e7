"""A fetched or stored document to a page, by what it is rather than by what it is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from toolhost.browsing.charset import decode
from toolhost.browsing.errors import FetchError
from toolhost.browsing.html import NO_TEXT, WEB_SCHEMES, RenderedHtml, render_html
from toolhost.browsing.html_isolated import html_worker, is_risky, parse_output
from toolhost.browsing.links import host_of
from toolhost.browsing.page import Page, clean, one_line, with_url_line
from toolhost.browsing.pdf import PdfLimits, PdfText, read_pdf, read_pdf_async

SOURCE_PREFIX = "view-source:"
_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript", "application/yaml")
_TEXT_SUFFIXES = ("+json", "+xml", "+yaml")
_UNTOLD = frozenset({"", "application/octet-stream", "binary/octet-stream", "application/x-download"})
_HTML_STARTS = (b"<!doctype html", b"<html", b"<head", b"<body")
_TRUNCATED = "\n\n(The document is longer than this browser reads; the rest is not shown.)"
_BODY_OFFSET = 2


@dataclass(frozen=True)
class Bytes:
    """A document before it is a page.

    Attributes:
        url: Final URL.
        content_type: Media type without parameters, or empty.
        charset: From the header, or None.
        schemes: Schemes its links may have.
    """

    url: str
    content_type: str
    charset: str | None
    body: bytes
    truncated: bool = False
    schemes: frozenset[str] = field(default=WEB_SCHEMES)


@dataclass(frozen=True)
class RenderLimits:
    """Bounds of turning a document into text."""

    seconds: float = 20.0
    pdf: PdfLimits = field(default_factory=PdfLimits)


async def to_page(document: Bytes, limits: RenderLimits, *, source: bool = False) -> Page:
    """The page of a document, made off the event loop.

    Args:
        source: Show the document as it was sent.

    Raises:
        FetchError: not something that has a text, or beyond the limits.
    """
    kind = kind_of(document)
    if source and kind != "pdf":
        return await asyncio.to_thread(_source_page, document)
    if kind == "pdf":
        return _pdf_page(document, await read_pdf_async(document.body, limits.pdf))
    if kind == "html":
        text = await asyncio.to_thread(decode, document.body, document.charset)
        if await asyncio.to_thread(is_risky, text):
            worker = html_worker(text, document.url, document.schemes, limits.seconds)
            return await asyncio.to_thread(_isolated_page, document, await worker.output_async())
        return await asyncio.to_thread(_html_page, document, text, limits)
    return await asyncio.to_thread(_text_page, document)


def to_page_now(document: Bytes, limits: RenderLimits) -> Page:
    """`to_page` for callers that may block, such as an index being made."""
    kind = kind_of(document)
    if kind == "pdf":
        return _pdf_page(document, read_pdf(document.body, limits.pdf))
    if kind == "html":
        text = decode(document.body, document.charset)
        if is_risky(text):
            return _isolated_page(document, html_worker(text, document.url, document.schemes, limits.seconds).output())
        return _html_page(document, text, limits)
    return _text_page(document)


def kind_of(document: Bytes) -> str:
    """`html`, `pdf` or `text`.

    Raises:
        FetchError: anything else, named.
    """
    head = document.body[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    content_type = document.content_type
    if head.startswith(b"%pdf-"):
        return "pdf"
    if content_type in _HTML_TYPES:
        return "html"
    if content_type == "application/pdf":
        raise FetchError("it is called a PDF but is none")
    if content_type in _UNTOLD or content_type == "text/plain":
        if _looks_like_html(head) and content_type != "text/plain":
            return "html"
        if not _looks_binary(document.body):
            return "text"
        content_type = content_type if content_type in _UNTOLD and content_type else "binary data"
    elif content_type.startswith(_TEXT_TYPES) or content_type.endswith(_TEXT_SUFFIXES):
        return "html" if _looks_like_html(head) else "text"
    raise FetchError(f"its type, {one_line(content_type, 80)}, has no text to show")


def _looks_like_html(head: bytes) -> bool:
    if head.startswith((b"<?xml", b"<!--")):
        return b"<html" in head
    return head.startswith(_HTML_STARTS)


def _looks_binary(body: bytes) -> bool:
    sample = body[:2048]
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return False
    return b"\0" in sample


def _text_page(document: Bytes) -> Page:
    text = clean(decode(document.body, document.charset)).rstrip("\n")
    return _page(document, _name(document.url), text or "(This document is empty.)")


def _html_page(document: Bytes, text: str, limits: RenderLimits) -> Page:
    deadline = time.monotonic() + limits.seconds
    return _rendered_page(document, render_html(text, document.url, schemes=document.schemes, deadline=deadline))


def _isolated_page(document: Bytes, output: bytes) -> Page:
    return _rendered_page(document, parse_output(output))


def _rendered_page(document: Bytes, rendered: RenderedHtml) -> Page:
    title, body = rendered.title or _name(document.url), rendered.body or NO_TEXT
    return _page(document, title, body, rendered.links, rendered.anchors)


def _pdf_page(document: Bytes, pdf: PdfText) -> Page:
    return _page(document, one_line(pdf.title) or _name(document.url), pdf.body())


def _page(
    document: Bytes,
    title: str,
    body: str,
    links: tuple[str, ...] = (),
    anchors: Mapping[str, int] | None = None,
) -> Page:
    if document.truncated:
        body += _TRUNCATED
    return Page(
        url=document.url,
        title=title,
        text=with_url_line(clean(document.url), body),
        links=links,
        anchors={name: line + _BODY_OFFSET for name, line in (anchors or {}).items()},
    )


def _source_page(document: Bytes) -> Page:
    url = SOURCE_PREFIX + document.url
    text = clean(decode(document.body, document.charset)).rstrip("\n")
    return Page(
        url=url,
        title=_name(document.url),
        text=with_url_line(clean(url), (text or "(This document is empty.)") + _TRUNCATED * document.truncated),
        kind="source",
    )


def _name(url: str) -> str:
    """A title for what has none: the last part of the path, else the host."""
    try:
        name = PurePosixPath(unquote(urlsplit(url).path)).name
    except ValueError:
        name = ""
    return one_line(name) or host_of(url)
