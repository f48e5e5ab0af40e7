"""Text output of a document walk: paragraphs, headings, lists, code, tables, and where links and anchors fall.

Blocks that cannot be blocks where they stand (in a table cell or a link's text) become spaces there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_ANCHORS = 10_000
_SPACE = re.compile(r"[ \t\n\f\r]+")
_MAX_INDENT = 40


@dataclass
class _List:
    """An open list; `bare` is one that items outside of any list stand in."""

    ordered: bool
    number: int
    items: int = 0
    bare: bool = False


@dataclass
class _Table:
    """The row being collected; None outside a row and in a row that is laid out as blocks."""

    cells: list[str] | None = None


@dataclass
class _Link:
    start: int
    saved_space: bool
    block: bool = False
    gap: bool = False
    images: list[str] = field(default_factory=list)
    image_alts: list[str] = field(default_factory=list)


def _mark_code(content: str, mark: Callable[[str], str]) -> str:
    """Link text inside a code block: white space stays outside the marks, each line has its own."""
    lines = []
    for line in content.split("\n"):
        text = line.strip()
        lines.append(line.replace(text, mark(text), 1) if text else line)
    return "\n".join(lines)


class Writer:
    """Collects lines. The caller walks the document and says what opens and closes; both always in pairs."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._buffer: list[str] = []
        self._space = False
        self._gap = False
        self._gap_prefix = ""
        self._prefix = ""
        self._marker = ""
        self._heading = ""
        self._heading_depth = 0
        self._code_depth = 0
        self._code_start = 0
        self._lists: list[_List] = []
        self._open_items = 0
        self._prefixes: list[str] = []
        self._tables: list[_Table] = []
        self._links: list[_Link] = []
        self._cell_start: int | None = None
        self._scripts: list[int] = []
        self._anchors: dict[str, int] = {}
        self._waiting: list[str] = []

    def finish(self) -> tuple[str, Mapping[str, int]]:
        """The body text and the line of each anchor in it."""
        self._flush()
        self._place_anchors(max(len(self._lines) - 1, 0))
        return "\n".join(self._lines), self._anchors

    # Inline content

    def text(self, text: str) -> None:
        """Add text of the document; white space collapses unless code is open."""
        if not text:
            return
        if self._code_depth:
            self._buffer.append(text)
            return
        text = _SPACE.sub(" ", text)
        if text == " ":
            self._space = True
            return
        if text[0] == " ":
            self._space = True
            text = text[1:]
        trailing = text[-1] == " "
        self.inline(text[:-1] if trailing else text)
        self._space = trailing

    def inline(self, text: str) -> None:
        """Add a piece as it is, after the white space that is due."""
        if self._space and self._buffer:
            self._buffer.append(" ")
        self._space = False
        self._buffer.append(text)

    def code_mark(self) -> None:
        """Begin or end code within a line; in a code block it needs no mark."""
        if not self._code_depth:
            self.inline("`")

    def image(self, mark: str, alt: str) -> None:
        """Add an image's mark; inside a link also remember its alt text, should it be the link's only content."""
        if self._links:
            self._links[-1].images.append(mark)
            self._links[-1].image_alts.append(alt)
        self.inline(mark)

    def line_break(self) -> None:
        """End the line, not the paragraph."""
        if self._code_depth:
            self._buffer.append("\n")
        else:
            self.block(gap=False)

    def open_script(self, opening: str) -> None:
        """Begin a superscript or subscript."""
        self.inline(opening)
        self._scripts.append(len(self._buffer))

    def close_script(self) -> None:
        """End it; an empty one leaves nothing."""
        start = self._scripts.pop()
        if start > len(self._buffer):
            return  # the line ended inside it
        if not any(self._buffer[index].strip() for index in range(start, len(self._buffer))):
            del self._buffer[max(start - 1, 0) :]
            return
        self._space = False
        self._buffer.append("}")

    # Links

    def open_link(self) -> None:
        """Begin a link's text."""
        self._links.append(_Link(len(self._buffer), self._space))

    def close_link(self, mark: Callable[[str], str], name: str) -> None:
        """End a link's text and replace it by `mark(text)`; `name` stands in for a link without text.

        `mark` is called only when there is a text, so that ids count real links.
        """
        link = self._links.pop()
        content = "".join(self._buffer[link.start :])
        del self._buffer[link.start :]
        if self._code_depth:
            self._buffer.append(_mark_code(content, mark))
            return
        text = _SPACE.sub(" ", content).strip()
        if link.images and text == " ".join(link.images):
            text = " ".join(alt for alt in link.image_alts if alt) or name or text
        text = text or name
        if text:
            trailing = self._space
            self._space = link.saved_space or content[:1] == " "
            self.inline(mark(text))
            self._space = trailing
        else:
            self._space = self._space or link.saved_space
        if link.block and not self._heading_depth:
            self._flush()
            if link.gap:
                self._want_gap()

    # Blocks

    def block(self, *, gap: bool) -> None:
        """A block boundary; with `gap`, an empty line separates it from what came before."""
        if self._code_depth:
            return
        if self._links:
            self._block_in_link(gap)
        elif self._cell_start is not None or self._heading_depth:
            self._space = True
        else:
            self._flush()
            if gap:
                self._want_gap()

    def _want_gap(self) -> None:
        """Ask for an empty line before the next line; it is marked no deeper than what it separates."""
        if self._marker:
            return  # nothing of the item is there yet
        if not self._gap or len(self._prefix) < len(self._gap_prefix):
            self._gap_prefix = self._prefix
        self._gap = True

    def _block_in_link(self, gap: bool) -> None:
        link = self._links[-1]
        free = self._cell_start is None and not self._heading_depth
        if free and len(self._buffer) == link.start:
            # A link around blocks starts on a line of its own.
            self._flush()
            link.start, link.saved_space = 0, False
            if gap:
                self._want_gap()
        link.gap = link.gap or (free and gap)
        link.block = link.block or free
        self._space = True

    def rule(self) -> None:
        """A horizontal rule."""
        self.block(gap=True)
        if not self._links and self._cell_start is None and not self._heading_depth and not self._code_depth:
            self._push("* * *")
            self._want_gap()

    def open_heading(self, marks: str) -> None:
        """Begin a heading; `marks` are its number signs and a space."""
        self._leave_cell()
        self.block(gap=True)
        self._heading_depth += 1
        if not self._code_depth and not any(self._buffer):
            self._heading = marks

    def close_heading(self) -> None:
        """End the heading."""
        self._heading_depth -= 1
        self.block(gap=True)
        if not self._links:
            self._heading = ""

    def open_code(self) -> None:
        """Begin a code block: its text is kept exactly, indented by four."""
        if self._code_depth == 0 and not self._links:
            self._leave_cell()
            self._heading_depth, saved = 0, self._heading_depth
            self._flush()
            self._heading_depth = saved
            self._want_gap()
            self._code_start = len(self._buffer)
        if not self._links or self._code_depth:
            self._code_depth += 1
        else:
            self._links[-1].block = True

    def close_code(self) -> None:
        """End the code block."""
        if not self._code_depth:
            return
        self._code_depth -= 1
        if self._code_depth:
            return
        text = "".join(self._buffer)
        self._buffer.clear()
        self._space = False
        lines = text.split("\n")
        while lines and not lines[-1].strip():
            lines.pop()
        if any(line.strip() for line in lines):
            for line in lines:
                self._push("    " + line if line.strip() else "", keep_empty=True)
        self._want_gap()

    def open_quote(self) -> None:
        """Begin a block quotation."""
        self.block(gap=True)
        self._indent("> ")

    def close_quote(self) -> None:
        """End it."""
        self.block(gap=True)
        self._dedent()

    def open_definition(self) -> None:
        """Begin the description of a term, indented by four."""
        self.block(gap=False)
        self._indent("    ")

    def close_definition(self) -> None:
        """End it."""
        self.block(gap=False)
        self._dedent()

    def _indent(self, by: str) -> None:
        self._prefixes.append(self._prefix)
        if len(self._prefix) < _MAX_INDENT:
            self._prefix += by

    def _dedent(self) -> None:
        self._prefix = self._prefixes.pop()

    # Lists

    def open_list(self, *, ordered: bool, start: int | None) -> None:
        """Begin a list; only an outermost one is set off by empty lines."""
        if self._lists and self._lists[-1].bare and not self._open_items:
            self._lists.pop()
        self.block(gap=not self._lists)
        self._lists.append(_List(ordered, 1 if start is None else start))

    def close_list(self) -> None:
        """End it."""
        self._lists.pop()
        self.block(gap=not self._lists)

    def open_item(self, number: int | None) -> None:
        """Begin an item of the innermost list."""
        self.block(gap=False)
        if not self._lists:
            self._lists.append(_List(False, 1, bare=True))
        current = self._lists[-1]
        if number is not None:
            current.number = number
        if current.items and self._lines:
            self._gap = False
        current.items += 1
        marker = f"{current.number}. " if current.ordered else "* "
        current.number += 1
        outer = self._prefix
        self._open_items += 1
        self._indent("  " if len(self._lists) > 1 else "    ")
        if self._cell_start is None and not self._links and not self._code_depth:
            self._marker = (outer if len(self._lists) > 1 else outer + "  ") + marker

    def close_item(self) -> None:
        """End it."""
        self.block(gap=False)
        self._dedent()
        self._open_items -= 1
        if self._marker and self._cell_start is None and not self._links:
            self._marker = ""

    # Tables

    def open_table(self) -> None:
        """Begin a table. One inside a cell makes that row a layout of blocks."""
        self._leave_cell()
        self.block(gap=True)
        self._tables.append(_Table())

    def close_table(self) -> None:
        """End it."""
        self._tables.pop()
        self.block(gap=True)

    def open_row(self) -> None:
        """Begin a row; its cells are collected until it closes."""
        self.block(gap=False)
        if self._tables and not self._links and not self._code_depth and not self._heading_depth:
            self._tables[-1].cells = []

    def close_row(self) -> None:
        """End a row: one line."""
        cells = self._tables[-1].cells if self._tables else None
        if cells is None:
            self.block(gap=False)
            return
        self._tables[-1].cells = None
        if any(cells):
            self._push("| " + " | ".join(cells) + " |")

    def open_cell(self) -> None:
        """Begin a cell."""
        if self._tables and self._tables[-1].cells is not None:
            self._flush()
            self._cell_start = len(self._buffer)
            self._space = False
        else:
            self.block(gap=False)

    def close_cell(self) -> None:
        """End a cell."""
        if self._cell_start is None:
            self.block(gap=False)
            return
        text = "".join(self._buffer[self._cell_start :]).strip()
        self._buffer.clear()
        self._space = False
        self._cell_start = None
        cells = self._tables[-1].cells
        if cells is not None:
            cells.append(text)

    def _leave_cell(self) -> None:
        """Turn the row being collected into blocks: it holds something that cannot stand on one line."""
        if self._cell_start is None or self._links:
            return
        self._cell_start = None
        cells = self._tables[-1].cells or []
        self._tables[-1].cells = None
        kept, self._buffer = self._buffer, []
        for cell in cells:
            if cell:
                self._push(cell)
        self._buffer = kept
        self._flush()

    # Lines

    def anchor(self, name: str) -> None:
        """Name the place that comes next."""
        if len(self._anchors) + len(self._waiting) < MAX_ANCHORS and len(name) <= 200:
            self._waiting.append(name)

    def _place_anchors(self, line: int) -> None:
        for name in self._waiting:
            self._anchors.setdefault(name, line)
        self._waiting.clear()

    def _flush(self) -> None:
        text = "".join(self._buffer).rstrip(" ") if self._buffer else ""
        self._buffer.clear()
        self._space = False
        if text.strip():
            self._push(self._heading + text)
            self._heading = ""

    def _push(self, line: str, *, keep_empty: bool = False) -> None:
        if self._gap and self._lines:
            shorter = min(self._gap_prefix, self._prefix, key=len)
            self._lines.append(shorter.rstrip())
        self._gap = False
        prefix = self._marker or self._prefix
        self._marker = ""
        self._place_anchors(len(self._lines))
        self._lines.append((prefix + line) if line or not keep_empty else prefix.rstrip())
