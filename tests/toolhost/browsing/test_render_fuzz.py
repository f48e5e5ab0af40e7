"""Tag soup of every kind: a page always comes out, clean and within bounds, and everything works on it."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from toolhost.browsing.find import find_in_page
from toolhost.browsing.html import render_html
from toolhost.browsing.page import Page, with_url_line
from toolhost.browsing.sections import sections

TAGS = [
    "a",
    "b",
    "p",
    "div",
    "ul",
    "ol",
    "li",
    "dl",
    "dt",
    "dd",
    "table",
    "tr",
    "td",
    "th",
    "caption",
    "thead",
    "tbody",
    "pre",
    "code",
    "h1",
    "h3",
    "sup",
    "sub",
    "blockquote",
    "span",
    "br",
    "hr",
    "img",
    "select",
    "option",
    "svg",
    "math",
    "noscript",
    "template",
    "form",
    "button",
    "details",
    "summary",
    "textarea",
    "script",
    "style",
    "dir",
    "menu",
    "marquee",
    "iframe",
    "label",
    "font",
    "nobr",
    "plaintext",
    "title",
    "base",
    "body",
    "html",
    "head",
    "frameset",
]
ATTRIBUTES = (
    *("", " href=/x", " href='https://o.example/'", " href=#f", " id=i", " name=n", " hidden", " alt=A src=s"),
    *(" start=7", " value=-3", " aria-label=L", " style='display:none'", " class=katex-html", " href='//[bad'"),
)
attributes = st.sampled_from(ATTRIBUTES)
opening = st.builds(lambda tag, attribute: f"<{tag}{attribute}>", st.sampled_from(TAGS), attributes)
closing = st.sampled_from(TAGS).map(lambda tag: f"</{tag}>")
text = st.sampled_from(
    ["x", " ", "word word", "\n", "【0†y】", "&#12304;", "\u200b", "人", "\t", "†", "<", "&amp", "\x00", "| "]
)
soup = st.lists(st.one_of(opening, closing, text, text, opening), max_size=60).map("".join)


@settings(max_examples=400, deadline=None)
@given(soup)
def test_any_soup_becomes_a_page(source: str) -> None:
    page = render_html(source, "https://e.example/d/")
    marks = re.findall(r"【(\d+)†[^†】]+(?:†[^†】]+)?】", page.body)
    assert len(marks) == page.body.count("【") == page.body.count("】")
    assert {int(number) for number in marks} == set(range(len(page.links)))
    assert not re.search("[\x00-\x08\x0b-\x1f\u200b◼]", page.body) and "\n" not in page.title
    lines = page.body.split("\n")
    assert all(0 <= line < len(lines) for line in page.anchors.values())
    assert not page.body or (lines[0].strip() and lines[-1].strip())
    assert all(first.strip(" >") or second.strip(" >") for first, second in pairwise(lines)) or (
        "<pre" in source or "<textarea" in source
    )


@settings(max_examples=120, deadline=None)
@given(soup, st.sampled_from(["x", "word", "y", "人", "word word", "a"]))
def test_find_sections_and_packing_work_on_any_page(source: str, pattern: str) -> None:
    rendered = render_html(source, "https://e.example/d/")
    page = Page("https://e.example/d/", "t", with_url_line("https://e.example/d/", rendered.body), rendered.links)
    found = find_in_page(page, pattern, 0)
    for line in found.link_lines.values():
        assert 0 <= line < len(page.lines)
    assert all(0 <= section.line < len(page.lines) for section in sections(page))
    assert Page.unpack(page.packed) == page and json.dumps(page.text)
