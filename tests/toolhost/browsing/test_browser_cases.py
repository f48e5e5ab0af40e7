# ruff: noqa: RUF001 - letters that look alike are the point
"""Every row of the cases for the browser: what a model sends, and the text it gets."""

from __future__ import annotations

import asyncio
import encodings
import pkgutil
import re
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from toolhost.browsing.browser import Browser
from toolhost.browsing.documents import Bytes, RenderLimits, to_page_now
from toolhost.browsing.estimate import estimate_tokens
from toolhost.browsing.find import find_in_page
from toolhost.browsing.page import Page
from toolhost.browsing.state import BrowserState
from toolhost.search.base import DomainList, Failure, Filters, Hit, SearchError
from toolhost.search.chain import SearchChain


def hits(*names: str) -> list[Hit]:
    return [Hit(title=name, url=f"https://{name}.example/", snippet=f"about {name}") for name in names]


async def test_a_search_shows_the_documented_page(desk: Any) -> None:
    desk.provider.hits = hits("one", "two")
    assert await desk.call("search", query="things") == (
        "[0] things\n"
        "**viewing lines [0 - 5] of 5**\n"
        "\n"
        "L0: \n"
        "L1: URL: \n"
        "L2: # Search Results\n"
        "L3: \n"
        "L4:   * 【0†one†one.example】 about one\n"
        "L5:   * 【1†two†two.example】 about two"
    )


async def test_a_page_shows_the_documented_form(desk: Any, site: Any) -> None:
    url = site.html("/a", "<h1>Head</h1><p>Some <a href='/b'>link</a>.</p>", title="A\n page")
    host = site.base.removeprefix("http://")
    assert await desk.call("open", id=url) == (
        f"[0] A page (http://{host}/a)\n"
        "**viewing lines [0 - 4] of 4**\n"
        "\n"
        "L0: \n"
        f"L1: URL: http://{host}/a\n"
        "L2: # Head\n"
        "L3: \n"
        "L4: Some 【0†link】."
    )


async def test_the_url_in_the_header_is_unquoted_and_bounded(desk: Any, site: Any) -> None:
    site.html("/wörld page", "text")
    header = (await desk.call("open", id=f"{site.base}/w%C3%B6rld%20page?q={'a' * 2000}")).split("\n")[0]
    url = header.removeprefix("[0] T (").removesuffix(")")
    assert url.startswith(f"{site.base}/wörld page?q=aaa") and url.endswith("aaa...") and len(url) == 1024


async def test_a_link_of_the_first_search_opens_after_a_second_search(desk: Any, site: Any) -> None:
    site.html("/first", "first page")
    desk.provider.hits = [Hit("first", f"{site.base}/first", "")]
    await desk.call("search", query="one")
    desk.provider.hits = hits("other")
    await desk.call("search", query="two")
    assert "first page" in await desk.call("open", id=0, cursor=0)


async def test_an_old_cursor_shows_what_it_showed_though_the_page_changed(desk: Any, site: Any) -> None:
    url = site.html("/p", "before")
    await desk.call("open", id=url)
    site.html("/p", "after")
    assert "after" in await desk.call("open", id=url)
    again = await desk.call("open", cursor=0)
    assert again.startswith("[2] ") and "before" in again and "after" not in again


async def test_the_stack_survives_being_stored(desk: Any, site: Any) -> None:
    url = site.html("/p", "kept text <a href='/q'>q</a> <i id=here>x</i>")
    await desk.call("open", id=url)
    await desk.call("find", pattern="kept")
    restored = desk.again(BrowserState.from_parts(desk.state.unsaved()))
    assert "kept text" in await restored.call("open", cursor=0)
    assert "kept text" in await restored.call("open", id=0, cursor=1)
    assert len(restored.state) == 4


class TestFind:
    async def test_a_phrase_over_two_display_lines_is_found(self, desk: Any, site: Any) -> None:
        words = "word " * 13 + "needle in the haystack " + "word " * 10
        await desk.call("open", id=site.html("/p", f"<p>{words}</p>"))
        found = await desk.call("find", pattern="needle in the haystack")
        assert found.startswith("[1] Find results for text: `needle in the haystack` in `T` (")
        assert "L0: # 【0†match at L2】\n" in found

    async def test_a_word_split_by_wrapping_is_found_on_its_display_line(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "x" * 70 + "abcdefghijklmnopqrst" + "y" * 100 + "<p>end</p>"))
        assert "【0†match at L2】" in await desk.call("find", pattern="ghijklmnop")
        assert "【0†match at L6】" in await desk.call("find", pattern="END", cursor=0)

    async def test_full_width_letters_and_case_are_alike(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "Ｐｙｔｈｏｎ and STRASSE and ﬁne"))
        for pattern in ("python", "ＰＹＴＨＯＮ", "straße", "fine", "python  and"):
            assert "【0†match at L2】" in await desk.call("find", pattern=pattern, cursor=0), pattern

    async def test_a_phrase_does_not_cross_a_paragraph(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "<p>one</p><p>two</p>"))
        assert "No `find` results" in await desk.call("find", pattern="one two")

    async def test_link_marks_are_not_text_and_are_not_shown(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "the <a href='https://o.example/'>linked word</a> here"))
        found = await desk.call("find", pattern="the linked word here")
        assert found.endswith("L0: # 【0†match at L2】\nL1: the linked word here")
        assert "No `find` results for pattern: `o.example`" in await desk.call("find", pattern="o.example", cursor=0)

    async def test_hits_show_four_lines_each_and_a_gap(self, desk: Any, site: Any) -> None:
        body = "".join(f"<div>line {n} {'hit' if n in (0, 2, 5) else ''}</div>" for n in range(10))
        await desk.call("open", id=site.html("/p", body))
        found = await desk.call("find", pattern="hit")
        text = [line.partition(": ")[2] for line in found.split("\n")[3:]]
        assert text == [
            "# 【0†match at L2】",
            *("line 0 hit", "line 1", "line 2 hit", "line 3"),
            "",
            "# 【1†match at L7】",
            *("line 5 hit", "line 6", "line 7", "line 8"),
        ]

    async def test_at_most_fifty_hits(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "<div>hit</div>" * 1000))
        await desk.call("find", pattern="hit")
        assert len(desk.state.page().links) == 50

    async def test_opening_a_hit_reopens_the_page_there(self, desk: Any, site: Any) -> None:
        body = "".join(f"<div>row {n}.</div>" for n in range(500))
        url = site.html("/p", body)
        await desk.call("open", id=url)
        await desk.call("find", pattern="row 300.")
        opened = await desk.call("open", id=0, cursor=1)
        assert opened.startswith("[2] T (") and f"**viewing lines [{302 - 4} - " in opened
        assert len(site.requests) == 1

    async def test_no_hit_pushes_a_page_that_says_so(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/p", "text"))
        found = await desk.call("find", pattern="absent")
        assert found.endswith("**viewing lines [0 - 0] of 0**\n\nL0: No `find` results for pattern: `absent`")
        assert len(desk.state) == 2

    @pytest.mark.parametrize("pattern", ["", "   ", None, [], "\u200b"])
    async def test_an_empty_pattern_is_an_error(self, desk: Any, site: Any, pattern: object) -> None:
        await desk.call("open", id=site.html("/p", "text"))
        assert "Invalid `pattern` parameter" in await desk.call("find", pattern=pattern)
        assert len(desk.state) == 1


class TestArguments:
    @pytest.mark.parametrize("number", [0, "0", 0.0, "0.0", " 0 "])
    async def test_a_link_number_comes_in_many_forms(self, desk: Any, site: Any, number: object) -> None:
        site.html("/b", "target")
        await desk.call("open", id=site.html("/a", "<a href='/b'>b</a>"))
        assert "target" in await desk.call("open", id=number)

    async def test_null_means_the_default(self, desk: Any, site: Any) -> None:
        url = site.html("/a", "text")
        await desk.call("open", id=url, cursor=None, loc=None, num_lines=None, view_source=None, source=None)
        assert "text" in await desk.call("open", id=None)
        assert "text" in await desk.call("open")

    async def test_a_location_as_a_float(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "<p>x</p>" * 30))
        assert "**viewing lines [5 - " in await desk.call("open", loc=5.0)

    async def test_unknown_arguments_are_ignored_and_url_is_an_alias(self, desk: Any, site: Any) -> None:
        url = site.html("/a", "text")
        assert "text" in await desk.call("open", url=url, wait=3, self_=1)
        arguments = {"id": url, "self": 1, "tool": 2}
        assert "text" in await desk.browser.call("open", arguments)

    @pytest.mark.parametrize("value", ["x", [1], {}, True, 1.5, float("nan"), float("inf"), "9" * 5000])
    async def test_nonsense_is_refused_with_what_is_meant(self, desk: Any, site: Any, value: object) -> None:
        await desk.call("open", id=site.html("/a", "text"))
        text = await desk.call("open", cursor=value)
        assert text.startswith("Invalid `cursor` parameter: `") and text.endswith("`. It must be an integer.")
        assert len(text) < 200 and len(desk.state) == 1

    @pytest.mark.parametrize("cursor", [-2, 2, "7", -100])
    async def test_a_cursor_out_of_range_tells_the_range(self, desk: Any, site: Any, cursor: object) -> None:
        url = site.html("/a", "text")
        await desk.call("open", id=url)
        await desk.call("open", id=url)
        expected = f"Cursor `{cursor}` is out of range. Available cursor indices: [0 - 1]."
        assert await desk.call("open", cursor=cursor) == expected
        assert await desk.call("find", pattern="x", cursor=cursor) == expected
        assert len(desk.state) == 2

    async def test_nothing_opened_yet(self, desk: Any) -> None:
        assert await desk.call("open") == "No pages to access!"
        assert await desk.call("open", id=3) == "No pages to access!"
        assert await desk.call("find", pattern="x") == "No pages to access!"

    async def test_a_link_out_of_range_tells_the_range(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "<a href='/x'>x</a><a href='/y'>y</a>"))
        assert await desk.call("open", id=9) == "Invalid link id `9`. Valid ids on this page: 0-1."
        assert await desk.call("open", id=-7) == "Invalid link id `-7`. Valid ids on this page: 0-1."
        await desk.call("open", id=site.html("/b", "none"))
        assert await desk.call("open", id=0) == "Invalid link id `0`. There are no links on this page."
        assert len(desk.state) == 2

    async def test_a_location_past_the_end_tells_the_end_and_pushes_nothing(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "text"))
        expected = "Invalid location parameter: `3`. Cannot exceed page maximum of 2."
        assert await desk.call("open", loc=3) == expected
        assert await desk.call("open", id=f"{site.base}/a", loc="3") == expected
        assert len(desk.state) == 1

    async def test_an_unknown_tool_names_the_tools(self, desk: Any) -> None:
        assert await desk.call("click") == "There is no tool `click`. There are: search, open, find."


class TestViewport:
    async def test_num_lines_is_capped_and_says_so(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "<div>x</div>" * 3000))
        text = await desk.call("open", num_lines=1_000_000)
        assert "**viewing lines [0 - 999] of 3001**" in text
        assert text.endswith("\n\n(num_lines is capped at 1000; go on with loc=1000.)")

    async def test_num_lines_shows_that_many(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "<div>x</div>" * 30))
        assert (await desk.call("open", loc=4, num_lines=2)).endswith("**viewing lines [4 - 5] of 31**\n\nL4: x\nL5: x")

    async def test_a_short_rest_is_shown_whole(self, desk: Any, site: Any) -> None:
        await desk.call("open", id=site.html("/a", "<div>x</div>" * 100))
        assert "**viewing lines [0 - 101] of 101**" in await desk.call("open")

    @pytest.mark.parametrize("text", ["人工智能改变世界", "ሰላም ለዓለም ይሁን እንዴት ነህ ", "The quick brown fox jumps. "])
    async def test_the_window_stays_within_the_token_budget(self, desk: Any, site: Any, text: str) -> None:
        shown = await desk.call("open", id=site.html("/a", f"<p>{text * 500}</p>"))
        body = shown.split("\n\n", 1)[1]
        used = sum(estimate_tokens(line + "\n") for line in body.split("\n"))
        assert 900 < used <= 1024

    async def test_a_line_over_the_budget_is_shown_alone(self, desk: Any) -> None:
        desk.browser._count = lambda text: 5000  # a counter for which nothing fits
        page = Page(url="", title="t", text="\n".join(["z" * 79] * 100))
        desk.state.push(page)
        assert "**viewing lines [0 - 0] of 99**" in await desk.call("open")


class TestSearch:
    async def test_missing_title_and_summary_fall_back(self, desk: Any) -> None:
        desk.provider.hits = [Hit(title="", url="https://e.example/path/x", snippet="")]
        assert (await desk.call("search", query="q")).endswith("L4:   * 【0†e.example/path/x†e.example】")

    async def test_an_apostrophe_in_a_url_stays(self, desk: Any) -> None:
        url = 'https://e.example/it\'s?a="b"&c=<d>'
        desk.provider.hits = [Hit(title="t", url=url, snippet="")]
        await desk.call("search", query="q")
        assert desk.state.page().links == (url,)

    async def test_markup_and_marks_in_a_summary_make_no_link(self, desk: Any) -> None:
        evil = '<a href="https://evil.example/">click</a> 【7†fake†x】 two\nlines\u200b'
        desk.provider.hits = [Hit(title="a†b【9†x】", url="https://e.example/", snippet=evil)]
        text = await desk.call("search", query="q")
        assert "【0†a‡b〖9‡x〗†e.example】" in text
        assert '<a href="https://evil.example/">click</a>' in text.replace("\n", " ").replace("L5: ", "")
        assert re.findall("【", text) == ["【"] and desk.state.page().links == ("https://e.example/",)

    async def test_no_hits_says_so(self, desk: Any) -> None:
        text = await desk.call("search", query="nothing at all")
        assert text.endswith("L4: No results found for `nothing at all`. Try other or fewer words.")
        assert len(desk.state) == 1

    @pytest.mark.parametrize(("topn", "asked"), [(3, 3), ("4", 4), (2.0, 2), (0, 1), (-5, 1), (500, 20), (None, 10)])
    async def test_topn_is_honoured_within_bounds(self, desk: Any, topn: object, asked: int) -> None:
        desk.provider.hits = hits(*(f"h{n}" for n in range(40)))
        text = await desk.call("search", query="q", topn=topn, source="web")
        assert desk.provider.asked == [("q", asked)] and len(desk.state.page().links) == asked
        assert f"【{asked - 1}†" in text and f"【{asked}†" not in text

    async def test_top_n_is_an_alias_of_topn(self, desk: Any) -> None:
        await desk.call("search", query="q", top_n="3")
        await desk.call("search", query="q", topn=2, top_n=5)
        assert desk.provider.asked == [("q", 3), ("q", 2)]

    async def test_a_failed_search_is_a_text_and_pushes_nothing(self, desk: Any) -> None:
        desk.provider.error = SearchError(Failure.KEY, "the key is wrong")
        assert await desk.call("search", query="q") == "Error during search for `q`: the key is wrong"
        assert len(desk.state) == 0

    @pytest.mark.parametrize("query", ["", "  ", None, [], {}])
    async def test_an_empty_query_is_an_error(self, desk: Any, query: object) -> None:
        assert "Invalid `query` parameter" in await desk.call("search", query=query)

    async def test_a_passage_opens_a_little_above_its_line(self, desk: Any, site: Any) -> None:
        url = site.html("/long", "".join(f"<div>row {n}</div>" for n in range(400)))
        desk.provider.hits = [Hit("long", url, "", line=100), Hit("top", url + "?2", "", line=3)]
        await desk.call("search", query="q")
        assert "**viewing lines [96 - " in await desk.call("open", id=0)
        site.pages["/long"] = site.pages["/long"]
        assert "**viewing lines [3 - " in await desk.call("open", id=1, cursor=0)
        assert "**viewing lines [7 - " in await desk.call("open", id=0, cursor=0, loc=7)

    async def test_the_text_names_the_source_after_a_fallback(self, desk: Any) -> None:
        spare = type(desk.provider)(name="spare", hits=hits("one"))
        desk.provider.error = SearchError(Failure.QUOTA, "the plan for scripted is used up")
        browser = Browser(desk.state, desk.loader, SearchChain([desk.provider, spare]), estimate_tokens)
        text = await browser.search("q")
        assert "(Source: spare, because the plan for scripted is used up.)" in text.replace("\nL7: ", " ")


class TestOpening:
    async def test_a_fragment_opens_at_its_anchor(self, desk: Any, site: Any) -> None:
        body = "".join(f"<h2 id='s{n}'>Part {n}</h2><p>{'text ' * 40}</p>" for n in range(50))
        site.html("/doc", body)
        text = await desk.call("open", id=f"{site.base}/doc#s20")
        assert re.search(r"\*\*viewing lines .*\n\nL(\d+): ## Part 20\n", text)
        await desk.call("open", id=site.html("/toc", "<a href='/doc#s30'>thirty</a>"))
        assert re.search(r"\*\*viewing lines .*\n\nL(\d+): ## Part 30\n", await desk.call("open", id=0))

    async def test_a_quoted_fragment_opens_at_its_anchor(self, desk: Any, site: Any) -> None:
        body = "".join(f"<h2 id='{name}'>{name}</h2><p>{'text ' * 400}</p>" for name in ("a", "Étymologie", "50%25"))
        site.html("/doc", body)
        await desk.call(
            "open", id=site.html("/toc", "<a href='/doc#%C3%89tymologie'>e</a><a href='/doc#50%25'>as is</a>")
        )
        assert re.search(r"\n\nL\d+: ## Étymologie\n", await desk.call("open", id=0))
        assert re.search(r"\n\nL\d+: ## Étymologie\n", await desk.call("open", id=f"{site.base}/doc#%C3%89tymologie"))
        assert re.search(r"\n\nL\d+: ## 50%25\n", await desk.call("open", id=1, cursor=0))

    async def test_a_string_is_fetched_anew_and_a_link_to_a_known_page_is_not(self, desk: Any, site: Any) -> None:
        site.html("/b", "target")
        url = site.html("/a", "<a href='/b'>b</a>")
        await desk.call("open", id=url)
        await desk.call("open", id=0)
        await desk.call("open", id=0, cursor=0)
        assert [request.path for request in site.requests] == ["/a", "/b"]
        await desk.call("open", id=url)
        assert [request.path for request in site.requests] == ["/a", "/b", "/a"]

    async def test_view_source_shows_the_source(self, desk: Any, site: Any) -> None:
        url = site.html("/a", "<p>one</p>\n  <b>two 【x】</b>")
        await desk.call("open", id=url)
        for arguments in ({"view_source": True}, {"id": url, "view_source": "true"}, {"id": f"view-source:{url}"}):
            text = await desk.call("open", **arguments)
            assert f"(view-source:{url})" in text and f"L1: URL: view-source:{url}\n" in text
            assert "L2: <html><head><title>T</title></head><body><p>one</p>\nL3:   <b>two 〖x〗</b>" in text

    async def test_a_search_page_has_no_source(self, desk: Any) -> None:
        desk.provider.hits = hits("one")
        await desk.call("search", query="q")
        assert "This page has no source" in await desk.call("open", view_source=True)

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("file:///etc/passwd", "only http and https can be opened, not `file:`"),
            ("data:text/html,hi", "only http and https can be opened, not `data:`"),
            ("javascript:alert(1)", "only http and https can be opened, not `javascript:`"),
            ("ftp://e.example/", "only http and https can be opened, not `ftp:`"),
            ("http://", "the URL names no host"),
            ("http://[::1", "not a URL"),
            ("http://e.example/a b", "quote it"),
            ("corpus://none/x.md", "the corpus has no such document"),
            ("nonsense", "only http and https can be opened"),
        ],
    )
    async def test_what_cannot_be_opened_says_why(self, desk: Any, url: str, reason: str) -> None:
        text = await desk.call("open", id=url)
        assert text.startswith(f"Error fetching URL `{url}`: ") and reason in text
        assert len(desk.state) == 0

    async def test_a_missing_page_is_a_text(self, desk: Any, site: Any) -> None:
        url = f"{site.base}/gone"
        assert await desk.call("open", id=url) == f"Error fetching URL `{url}`: HTTP 404 Not Found"

    async def test_only_urls_seen_in_the_session_may_be_opened(self, desk: Any, site: Any) -> None:
        url = site.html("/a", "<a href='/b'>b</a>")
        site.html("/b", "target")
        strict = desk.again(BrowserState(), only_seen=True)
        assert "only URLs from this session's search results" in await strict.call("open", id=url)
        assert site.requests == []
        desk.provider.hits = [Hit("a", url, "")]
        await strict.call("search", query="q")
        assert "【0†b】" in await strict.call("open", id=url)
        assert "target" in await strict.call("open", id=f"{site.base}/b#part")

    async def test_domain_lists_of_a_request_narrow(self, desk: Any, site: Any) -> None:
        url = site.html("/a", "text")
        denied = desk.again(BrowserState(), filters=Filters().narrowed(DomainList.of(deny=["127.0.0.1"])))
        assert "the domain 127.0.0.1 is not permitted here" in await denied.call("open", id=url)
        allowed = desk.again(BrowserState(), filters=Filters().narrowed(DomainList.of(allow=["127.0.0.1"])))
        assert "text" in await allowed.call("open", id=url)
        desk.provider.hits = hits("one", "two")
        only = desk.again(BrowserState(), filters=Filters().narrowed(DomainList.of(allow=["two.example"])))
        await only.call("search", query="q")
        assert only.state.page().links == ("https://two.example/",)


class TestDocuments:
    def page(self, body: bytes, content_type: str = "text/html", charset: str | None = None) -> Page:
        return to_page_now(Bytes("https://e.example/dir/x", content_type, charset, body), RenderLimits())

    def test_an_empty_body(self) -> None:
        assert self.page(b"").text.endswith(
            "\n(This page has no text. It may need JavaScript, which this browser does not run.)"
        )
        assert self.page(b"", "text/plain").text.endswith("\n(This document is empty.)")

    def test_xml_declared_html(self) -> None:
        page = self.page(
            b"<?xml version='1.0' encoding='utf-8'?>\n<!DOCTYPE html><html xmlns='http://www.w3.org/1999/xhtml'>"
            b"<head><title>X\xc3\xa9</title></head><body><p>caf\xc3\xa9</p></body></html>",
            "application/xhtml+xml",
        )
        assert (page.title, page.text) == ("Xé", "\nURL: https://e.example/dir/x\ncafé")

    def test_base_href_resolves_links(self) -> None:
        page = self.page(b"<base href='https://o.example/deep/'><a href='p'>p</a><a href='../q'>q</a>")
        assert page.links == ("https://o.example/deep/p", "https://o.example/q")

    @pytest.mark.parametrize(
        ("body", "content_type"),
        [
            ("<html><head><meta charset='windows-1251'></head><body>Привет, мир</body>".encode("cp1251"), "text/html"),
            (
                "<meta http-equiv='Content-Type' content='text/html; charset=windows-1251'>Привет, мир".encode(
                    "cp1251"
                ),
                "text/html",
            ),
            (b"\xff\xfe" + "<p>Привет, мир".encode("utf-16-le"), "text/html"),
            (b"\xfe\xff" + "Привет, мир".encode("utf-16-be"), "text/plain"),
            (b"\xef\xbb\xbf" + "Привет, мир".encode(), "text/plain"),
            ("Привет, мир".encode(), ""),
            (("Привет, мир. " + "Съешь ещё этих мягких французских булок, да выпей чаю. " * 5).encode("cp1251"), ""),
        ],
    )
    def test_encodings_are_told_or_detected(self, body: bytes, content_type: str) -> None:
        assert "Привет, мир" in self.page(body, content_type).text

    def test_the_header_wins_over_the_meta(self) -> None:
        body = "<meta charset='utf-8'>Привет".encode("koi8-r")
        assert "Привет" in self.page(body, "text/html", "koi8-r").text

    @pytest.mark.parametrize("label", ["hex", "zlib", "idna", "rot13", "undefined", "utf-7", "no-such", "x" * 500])
    def test_a_hostile_charset_label_is_no_codec(self, label: str) -> None:
        assert "text +ADw-" in self.page(b"<p>text +ADw-", "text/html", label).text

    def test_no_codec_of_python_that_a_page_names_fails(self) -> None:
        for module in pkgutil.iter_modules(encodings.__path__):
            assert self.page(b"<p>" + bytes(range(128, 256)), "text/html", module.name).lines

    @pytest.mark.parametrize(
        ("body", "content_type", "reason"),
        [
            (b"\x89PNG\r\n\x1a\n\0\0", "image/png", "its type, image/png, has no text to show"),
            (b"\0\1\2\3" * 50, "", "its type, binary data, has no text to show"),
            (b"\0\1\2\3" * 50, "application/octet-stream", "its type, application/octet-stream, has no text"),
            (b"nope", "application/pdf", "it is called a PDF but is none"),
        ],
    )
    def test_what_has_no_text_is_refused_by_name(self, body: bytes, content_type: str, reason: str) -> None:
        with pytest.raises(Exception, match=re.escape(reason)):
            self.page(body, content_type)

    def test_text_keeps_its_lines(self) -> None:
        page = self.page(b"a\r\n  b\n\tc\n", "text/plain")
        assert page.text == "\nURL: https://e.example/dir/x\na\n  b\n\tc"

    def test_json_is_text(self) -> None:
        assert self.page(b'{"a": 1}', "application/problem+json").text.endswith('\n{"a": 1}')


def test_no_module_of_the_browser_reads_the_environment() -> None:
    root = Path(__file__).parents[3] / "toolhost"
    files = [*root.joinpath("browsing").glob("*.py"), *root.joinpath("search").glob("*.py")]
    assert len(files) > 20
    assert [file.name for file in files if re.search(r"os\.environ|getenv", file.read_text())] == []


def test_finding_in_a_large_page_takes_linear_time() -> None:
    """Four times the page may take ten times as long, never sixteen."""
    for text, pattern in (
        ("a" * 79 + "\n", "aaa"),
        ("word " * 20, "d w"),
        ("a", "a" * 50 + "b"),
        ("【0†a†b】 ", "a a a"),
    ):
        times = []
        for size in (1_000_000, 4_000_000):
            page = Page("https://e.example/", "t", text * (size // len(text)))
            start = time.process_time()
            find_in_page(page, pattern, 0)
            times.append(time.process_time() - start)
        assert times[1] < times[0] * 10 + 0.05, (text[:10], times)


async def test_a_page_that_takes_too_long_is_a_text(desk: Any, site: Any) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(5)
        return web.Response()

    site.pages["/hang"] = hang
    hasty = desk.again(BrowserState(), deadline=0.2)
    text = await asyncio.wait_for(hasty.call("open", id=f"{site.base}/hang"), 4)
    assert text == f"Error fetching URL `{site.base}/hang`: no page within 0.2 seconds"
