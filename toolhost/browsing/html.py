"""HTML to page text: one parse (lexbor), one iterative walk, linear in the size of the document."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from selectolax.lexbor import LexborHTMLParser, LexborNode

from toolhost.browsing.errors import RenderTimeout
from toolhost.browsing.links import LinkTable, absolute
from toolhost.browsing.page import clean, one_line
from toolhost.browsing.writer import Writer

NO_TEXT = "(This page has no text. It may need JavaScript, which this browser does not run.)"
WEB_SCHEMES = frozenset({"http", "https"})

_SKIP = frozenset(
    {"style", "head", "template", "iframe", "object", "embed", "svg", "canvas", "audio", "video"}
    | {"datalist", "noframes", "noembed", "colgroup"}
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_PARAGRAPHS = frozenset({"p", "article", "section", "figure", "dl", "details", "fieldset", "caption", "hgroup"})
_LINES = frozenset(
    {"div", "header", "footer", "nav", "main", "aside", "form", "address", "center", "body", "html", "summary"}
    | {"figcaption", "legend", "option", "dt", "thead", "tbody", "tfoot", "search", "dialog", "optgroup"}
)
_CODE = frozenset({"code", "tt", "kbd"})
_PRE = frozenset({"pre", "listing", "xmp", "textarea"})
_DEADLINE_EVERY = 512
_HIDDEN_STYLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_TEX_SCRIPT = re.compile(r"math/tex", re.IGNORECASE)


@dataclass(frozen=True)
class RenderedHtml:
    """What a walk gives: body text without the URL line, and anchors counted in lines of that body."""

    title: str
    body: str
    links: tuple[str, ...]
    anchors: Mapping[str, int]


def render_html(
    source: str, url: str, *, schemes: frozenset[str] = WEB_SCHEMES, deadline: float | None = None
) -> RenderedHtml:
    """Turn HTML into the browser's text form.

    Args:
        source: The decoded document; hostile.
        url: Final URL after redirects; the base of relative links unless the page has `<base href>`.
        schemes: Schemes that may become links.
        deadline: `time.monotonic()` value after which the walk gives up.

    Raises:
        RenderTimeout: the deadline passed.
    """
    tree = LexborHTMLParser(clean(source))
    base = _base_url(tree, url, schemes)
    walk = _Walk(LinkTable(url), base, schemes, deadline)
    root = tree.root
    if root is not None:
        walk.run(root)
    body, anchors = walk.out.finish()
    return RenderedHtml(_title(tree), body, walk.links.urls, anchors)


def _base_url(tree: LexborHTMLParser, url: str, schemes: frozenset[str]) -> str:
    node = tree.css_first("base[href]")
    href = node.attributes.get("href") if node is not None else None
    return (absolute(url, href, schemes) if href else None) or url


def _title(tree: LexborHTMLParser) -> str:
    for selector in ("head > title", "title", "h1"):
        node = tree.css_first(selector)
        if node is not None and (text := one_line(node.text(deep=True))):
            return text
    return ""


class _Walk:
    """The walk over one tree. Entering and leaving are separate so that depth costs no Python stack."""

    def __init__(self, links: LinkTable, base: str, schemes: frozenset[str], deadline: float | None) -> None:
        self.out = Writer()
        self.links = links
        self._base = base
        self._schemes = schemes
        self._deadline = deadline
        self._images = 0
        self._links_open = 0
        # For each open <a> that may become a link: its URL, its name for when it has no text, images in it.
        self._open_links: list[tuple[str, str]] = []

    def run(self, root: LexborNode) -> None:
        """Walk the tree below `root` in document order."""
        node: LexborNode | None = root
        stack: list[tuple[LexborNode, str]] = []
        count = 0
        while node is not None:
            count += 1
            if count % _DEADLINE_EVERY == 0:
                self._check_deadline()
            tag = node.tag or ""
            child = None
            if tag == "-text":
                self.out.text(clean(node.text_content or ""))
            elif not tag.startswith("-") and self._enter(node, tag):
                child = node.first_child
                if child is None:
                    self._leave(tag)
                else:
                    stack.append((node, tag))
            following = child or node.next
            while following is None and stack:
                parent, parent_tag = stack.pop()
                self._leave(parent_tag)
                following = parent.next if stack else None
            node = following

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise RenderTimeout("the page takes too long to turn into text")

    def _enter(self, node: LexborNode, tag: str) -> bool:
        """Open an element. False when its content must not be walked (then it is not left either)."""
        if tag in _SKIP:
            return False
        attributes = node.attributes
        if attributes and _is_hidden(attributes):
            return False
        if tag == "script":
            if _TEX_SCRIPT.search(attributes.get("type") or ""):
                self.out.text(node.text(deep=True))
            return False
        if tag == "math":
            self.out.text(_math_text(node, attributes))
            return False
        if tag == "img":
            self._image(attributes)
            return False
        if anchor := attributes.get("id") or (attributes.get("name") if tag == "a" else None):
            self.out.anchor(anchor)
        return self._open(tag, attributes)

    def _open(self, tag: str, attributes: Mapping[str, str | None]) -> bool:
        out = self.out
        if tag == "a":
            self._open_link(attributes)
        elif tag == "br":
            out.line_break()
        elif tag == "hr":
            out.rule()
        elif tag in _HEADINGS:
            out.open_heading(_HEADINGS[tag])
        elif tag in _PRE:
            out.open_code()
        elif tag in _CODE:
            out.code_mark()
        elif tag in ("sup", "sub"):
            out.open_script("^{" if tag == "sup" else "_{")
        elif tag in ("ul", "ol", "dir", "menu"):
            out.open_list(ordered=tag == "ol", start=_number(attributes.get("start"), 1))
        elif tag == "li":
            out.open_item(_number(attributes.get("value"), None))
        elif tag == "blockquote":
            out.open_quote()
        elif tag == "dd":
            out.open_definition()
        elif tag == "table":
            out.open_table()
        elif tag == "tr":
            out.open_row()
        elif tag in ("td", "th"):
            out.open_cell()
        elif tag in _PARAGRAPHS:
            out.block(gap=True)
        elif tag in _LINES:
            out.block(gap=False)
        return True

    def _leave(self, tag: str) -> None:
        out = self.out
        if tag == "a":
            self._close_link()
        elif tag in _HEADINGS:
            out.close_heading()
        elif tag in _PRE:
            out.close_code()
        elif tag in _CODE:
            out.code_mark()
        elif tag in ("sup", "sub"):
            out.close_script()
        elif tag in ("ul", "ol", "dir", "menu"):
            out.close_list()
        elif tag == "li":
            out.close_item()
        elif tag == "blockquote":
            out.close_quote()
        elif tag == "dd":
            out.close_definition()
        elif tag == "table":
            out.close_table()
        elif tag == "tr":
            out.close_row()
        elif tag in ("td", "th"):
            out.close_cell()
        elif tag in _PARAGRAPHS:
            out.block(gap=True)
        elif tag in _LINES:
            out.block(gap=False)

    def _open_link(self, attributes: Mapping[str, str | None]) -> None:
        href = attributes.get("href")
        # A link in a link (only tables allow it) is text: text would be copied once for each level.
        url = absolute(self._base, href, self._schemes) if href and not self._links_open else None
        name = attributes.get("aria-label") or attributes.get("title") or ""
        self._open_links.append((url or "", one_line(name)))
        if url:
            self.out.open_link()
            self._links_open += 1

    def _close_link(self) -> None:
        url, name = self._open_links.pop()
        if url:
            self._links_open -= 1
            self.out.close_link(lambda text: self.links.mark(url, text), name)

    def _image(self, attributes: Mapping[str, str | None]) -> None:
        alt = one_line(attributes.get("alt") or attributes.get("title") or "", 1000)
        mark = f"[Image {self._images}: {alt}]" if alt else f"[Image {self._images}]"
        self._images += 1
        self.out.image(mark, alt)


def _is_hidden(attributes: Mapping[str, str | None]) -> bool:
    if "hidden" in attributes and attributes["hidden"] != "until-found":
        return True
    style = attributes.get("style")
    if style and _HIDDEN_STYLE.search(style):
        return True
    # KaTeX and MediaWiki write each formula twice: as MathML, which is shown, and as spans or an image.
    classes = attributes.get("class")
    return classes is not None and ("katex-html" in classes or "mwe-math-fallback-image" in classes)


def _math_text(node: LexborNode, attributes: Mapping[str, str | None]) -> str:
    if alt := attributes.get("alttext"):
        return clean(alt)
    annotation = node.css_first('annotation[encoding="application/x-tex"]')
    return clean((annotation or node).text(deep=True))


def _number(value: str | None, default: int | None) -> int | None:
    try:
        return int(value) if value is not None and len(value) < 10 else default
    except ValueError:
        return default
