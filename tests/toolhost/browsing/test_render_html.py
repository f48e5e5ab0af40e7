# ruff: noqa: RUF001 - letters that look alike are the point
"""HTML in, page text out: each pair is the whole text, exactly."""

from __future__ import annotations

import time

import pytest

from toolhost.browsing.errors import RenderTimeout
from toolhost.browsing.html import render_html

BASE = "https://e.example/dir/page"

PAGES = {
    "words inside a tag stay whole": ("un<b>believ</b>able, <i>so</i> it is", "unbelievable, so it is"),
    "white space collapses": ("<p>  a \n\t b <b> c </b> d\n</p>", "a b c d"),
    "emoji and astral letters stay": ("<p>👩‍💻 𝔘𝔫𝔦 🇩🇪</p>", "👩‍💻 𝔘𝔫𝔦 🇩🇪"),
    "a hard space stays": ("<p>10&nbsp;km</p>", "10\u00a0km"),
    "paragraphs are parted by one empty line": ("<p>a</p>\n\n<p>b</p><p></p><p>c</p>", "a\n\nb\n\nc"),
    "divisions are lines": ("<div>a</div><div><div>b</div></div>c", "a\nb\nc"),
    "a line break": ("<p>a<br>b<br/>c</p>", "a\nb\nc"),
    "headings": ("<h1>One</h1><h2>Two</h2>text<h6>Six</h6>", "# One\n\n## Two\n\ntext\n\n###### Six"),
    "a heading with a break and a block": ("<h2>a<br>b<div>c</div></h2>d", "## a b c\n\nd"),
    "an empty heading": ("<h2> </h2><p>x</p>", "x"),
    "a rule": ("a<hr>b", "a\n\n* * *\n\nb"),
    "a flat list": ("<p>a</p><ul><li>x</li><li>y</li></ul><p>b</p>", "a\n\n  * x\n  * y\n\nb"),
    "a numbered list": ("<ol><li>x<li>y</ol>", "  1. x\n  2. y"),
    "a list that starts elsewhere": ("<ol start=5><li>x<li value=9>y<li>z</ol>", "  5. x\n  9. y\n  10. z"),
    "nested lists": (
        "<ul><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li><li>d</li></ul>",
        "  * a\n    * b\n      1. c\n  * d",
    ),
    "a list item of paragraphs": ("<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>", "  * a\n\n    b\n  * c"),
    "items outside of a list": ("<li>a<li>b</li><p>c</p><ul><li>d</ul>", "  * a\n  * b\n\nc\n\n  * d"),
    "an empty item": ("<ul><li></li><li>x</li></ul>", "  * x"),
    "code is exact": (
        "<p>see</p><pre>    first\nsecond\n\n\tthird  \n</pre><p>end</p>",
        "see\n\n        first\n    second\n\n    \tthird  \n\nend",
    ),
    "code with tags": (
        "<pre><code><span>def</span> f():\n  <b>return</b> 1</code></pre>",
        "    def f():\n      return 1",
    ),
    "code in a list": ("<ul><li>do:<pre>x\n  y</pre></li></ul>", "  * do:\n\n        x\n          y"),
    "breaks in code": ("<pre>a<br>b</pre>", "    a\n    b"),
    "inline code": ("<p>call <code>f(x)</code>, <kbd>q</kbd></p>", "call `f(x)`, `q`"),
    "a quotation": ("a<blockquote><p>b</p><p>c</p></blockquote>d", "a\n\n> b\n>\n> c\n\nd"),
    "terms": ("<dl><dt>t</dt><dd>d</dd><dt>u</dt><dd>e</dd></dl>", "t\n    d\nu\n    e"),
    "a table": (
        "<table><caption>Cap</caption><thead><tr><th>a<th>b</thead><tr><td>1</td><td></td></tr></table>",
        "Cap\n\n| a | b |\n| 1 |  |",
    ),
    "blocks in a cell stay in the row": (
        "<table><tr><td><p>a</p><p>b</p></td><td><ul><li>c</li><li>d</li></ul></td></tr></table>",
        "| a b | c d |",
    ),
    "a layout table": (
        "<table><tr><td>menu</td><td><table><tr><td>1</td><td>2</td></tr></table></td></tr></table>after",
        "menu\n\n| 1 | 2 |\n\nafter",
    ),
    "code in a cell": ("<table><tr><td>1\n2</td><td><pre>a\n  b</pre></td></tr></table>", "1 2\n\n    a\n      b"),
    "scripts": ("<p>x<sup>2</sup>, H<sub>2</sub>O, n<sup></sup></p>", "x^{2}, H_{2}O, n"),
    "images": (
        '<img src=a alt="one"><img src=b><img src=c title="three"> t',
        "[Image 0: one][Image 1][Image 2: three] t",
    ),
    "links are numbered by URL": (
        '<a href="/a">x</a> <a href="https://o.example/">y</a> <a href="/a">again</a> <a href="b">z</a>',
        "【0†x】 【1†y†o.example】 【0†again】 【2†z】",
    ),
    "fragments and other schemes are text": (
        '<a href="#x">a</a> <a href="mailto:m@e.example">b</a> <a href="javascript:x()">c</a> <a>d</a>'
        '<a href="data:x">e</a> <a href="file:///f">f</a>',
        "a b c de f",
    ),
    "a dagger in a link": ('<a href="/a">a†b</a>', "【0†a‡b】"),
    "marks of the page are no links": ("<p>【0†fake†x】 ◼\u200b</p>", "〖0†fake†x〗 ◾"),
    "entities cannot make marks": ("<p>&#12304;0†fake&#12305;</p>", "〖0†fake〗"),
    "space around a link stays outside": ("a<a href=/x> b </a>c <a href=/y>d</a>.", "a 【0†b】 c 【1†d】."),
    "an empty link takes no number": ('<a href="/x"></a><a href="/y"> </a><a href="/z">z</a>', "【0†z】"),
    "a link named for its label": ('<a href="/x" aria-label="Menu"><svg><path/></svg></a>', "【0†Menu】"),
    "a link around an image": ('<a href="/x"><img src=i alt="Logo"></a>', "【0†Logo】"),
    "a link around an image and text": ('<a href="/x"><img src=i alt="L"> go</a>', "【0†[Image 0: L] go】"),
    "a link around blocks": (
        'x <a href="/x"><div>a</div><div>b</div></a><a href="/y"><h3>T</h3><p>d</p></a>',
        "x\n【0†a b】\n\n### 【1†T d】",
    ),
    "a link in a heading": ('<h2>see <a href="/x">x</a></h2>', "## see 【0†x】"),
    "links in code": ('<pre>  <a href="/x">x</a>  1\n<a href="/y">y</a></pre>', "      【0†x】  1\n    【1†y】"),
    "links in cells": ("<table><tr><td><a href=/x>x</a></td><td>y</td></tr></table>", "| 【0†x】 | y |"),
    "maths as LaTeX": (
        '<math alttext="a^2"><mi>a</mi></math> <math><semantics><mi>q</mi>'
        '<annotation encoding="application/x-tex">\\frac{1}{2}</annotation></semantics></math>',
        "a^2 \\frac{1}{2}",
    ),
    "maths shown once": (
        '<span class="katex"><span class="katex-mathml"><math><semantics><mi>x</mi><annotation '
        'encoding="application/x-tex">x</annotation></semantics></math></span><span class="katex-html">x</span></span>'
        '<script type="math/tex">y^2</script>',
        "xy^2",
    ),
    "what is not shown": (
        "a<script>s</script><style>s</style><template>t</template><div hidden>h</div>"
        "<p style='display: none'>n</p><svg><text>v</text></svg><!-- c -->b",
        "ab",
    ),
    "text without scripts": ("<noscript><p>enable it</p></noscript>", "enable it"),
    "unclosed and crossed tags": ("<p>a<b>b<i>c</b>d</i><table><td>e", "abcd\n\n| e |"),
    "buttons and options": ("<button>Go</button> <select><option>a<option>b</select>", "Go\na\nb"),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_text(name: str) -> None:
    html, expected = PAGES[name]
    assert render_html(html, BASE).body == expected


def test_the_title_is_one_line_and_falls_back_to_a_heading() -> None:
    assert render_html("<title>\n a \n b </title>", BASE).title == "a b"
    assert render_html("<h1>Only a <b>heading</b></h1>", BASE).title == "Only a heading"
    assert render_html("<svg><title>icon</title></svg><p>x", BASE).title in ("icon", "")


def test_anchors_name_the_line_they_precede() -> None:
    page = render_html("<p id=a>x</p><h2 id=b>y</h2><a name=c></a><p>z<i id=d></i></p><p id=e></p>", BASE)
    assert page.body == "x\n\n## y\n\nz"
    assert page.anchors == {"a": 0, "b": 2, "c": 4, "d": 4, "e": 4}


def test_relative_links_resolve_on_the_page() -> None:
    page = render_html("<a href='a?b=1&amp;c'>1</a><a href='//o.example/x'>2</a><a href='../u p'>3</a>", BASE)
    assert page.links == (
        "https://e.example/dir/a?b=1&c",
        "https://o.example/x",
        "https://e.example/u%20p",
    )


def test_a_link_to_a_host_written_with_credentials_names_the_host_alone() -> None:
    assert render_html("<a href='https://good.example@evil.example/'>x</a>", BASE).body == "【0†x†evil.example】"


HOSTILE = {
    "links in a paragraph": lambda n: "<p>" + "".join(f'<a href="/p{i}">l{i}</a> ' for i in range(n)) + "</p>",
    "nesting": lambda n: "<div>" * n + "x" + "</div>" * n,
    "nested lists": lambda n: "<ul><li>a" * n,
    "nested tables": lambda n: "<table><tr><td>a" * n,
    "nested quotations": lambda n: "<blockquote>a" * n,
    "open formatting": lambda n: "<b><i>a<p>" * n,
    "one text node": lambda n: "<p>" + "word " * n,
    "one word": lambda n: "<p>" + "w" * n,
    "anchors": lambda n: "".join(f"<i id=a{i}></i>" for i in range(n)),
    "cells in a row": lambda n: "<table><tr>" + "<td>x" * n,
    "code blocks in cells": lambda n: "<table>" + "<tr><td><pre>x</pre>" * n,
    "nested code": lambda n: "<pre>a" * n,
    "links around blocks": lambda n: "<a href=/x><div>a</div></a>" * n,
    "sub in sub": lambda n: "<sub>a" * n,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pages_take_linear_time(name: str) -> None:
    """Four times the page may take ten times as long, never sixteen or more as a square would."""
    make, size = HOSTILE[name], 200_000 if name.startswith("one ") else 750 if "nest" in name else 2_000
    small, large = make(size), make(size * 4)
    render_html(small, BASE)
    times = []
    for page in (small, large):
        runs = []
        for _ in range(3):
            start = time.process_time()
            render_html(page, BASE)
            runs.append(time.process_time() - start)
        times.append(min(runs))
    assert times[1] < times[0] * 10 + 0.02, times


def test_twenty_thousand_links_three_thousand_levels_and_ten_megabytes() -> None:
    assert len(render_html(HOSTILE["links in a paragraph"](20_000), BASE).links) == 20_000
    assert render_html(HOSTILE["nesting"](3_000), BASE).body == "x"
    assert len(render_html("<p>" + "word " * 2_000_000, BASE).body) == 9_999_999


def test_a_deadline_ends_the_walk() -> None:
    with pytest.raises(RenderTimeout, match="too long"):
        render_html("<p>x</p>" * 2000, BASE, deadline=time.monotonic() - 1)
