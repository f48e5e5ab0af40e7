"""PDFs and risky HTML, read in processes that have limits and can be killed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from tests.toolhost.browsing.pdfs import make_pdf
from toolhost.browsing.documents import Bytes, RenderLimits, to_page, to_page_now
from toolhost.browsing.errors import FetchError
from toolhost.browsing.html_isolated import is_risky
from toolhost.browsing.page import Page
from toolhost.browsing.pdf import PdfLimits, read_pdf, read_pdf_async
from toolhost.browsing.worker import Worker


def page(body: bytes, limits: PdfLimits) -> Page:
    return to_page_now(Bytes("https://e.example/d.pdf", "application/pdf", None, body), RenderLimits(pdf=limits))


def test_a_pdf_shows_its_pages_under_marks() -> None:
    shown = page(make_pdf(["first words", "second words"], title="A paper"), PdfLimits())
    assert (shown.title, shown.text) == (
        "A paper",
        "\nURL: https://e.example/d.pdf\n[Page 1]\nfirst words\n\n[Page 2]\nsecond words",
    )


def test_a_pdf_called_octet_stream_is_known_by_its_beginning() -> None:
    document = Bytes("https://e.example/d", "application/octet-stream", None, make_pdf(["words"]))
    assert "[Page 1]\nwords" in to_page_now(document, RenderLimits()).text


def test_seven_hundred_pages_are_read_within_the_limits() -> None:
    pdf = make_pdf([f"page number {number}" for number in range(1, 701)])
    shown = read_pdf(pdf, PdfLimits())
    assert shown.total == 700 and len(shown.pages) == 700 and shown.pages[699] == "page number 700"
    cut = page(pdf, PdfLimits(pages=100))
    assert "page number 100\n\n(Pages 101 to 700 are not shown" in cut.text and "page number 101" not in cut.text


def test_a_limit_on_characters_keeps_what_fits() -> None:
    shown = read_pdf(make_pdf(["x" * 100] * 50), PdfLimits(characters=1050))
    assert sum(map(len, shown.pages)) == 1050 and shown.total == 50


@pytest.mark.parametrize(
    "body", [b"%PDF-1.4\ngarbage", make_pdf(["x"])[:200], b"%PDF-", b"%PDF-1.7\n" + os.urandom(5000)]
)
def test_a_damaged_pdf_is_a_text(body: bytes) -> None:
    with pytest.raises(FetchError, match=r"damaged or encrypted|limits"):
        page(body, PdfLimits())


def test_a_pdf_without_text_says_so() -> None:
    assert "(The pages have no text. They may be scanned images.)" in page(make_pdf([""]), PdfLimits()).text


def test_too_little_memory_or_time_is_a_text() -> None:
    with pytest.raises(FetchError, match="limits"):
        read_pdf(make_pdf(["x"]) + b" " * 50_000_000, PdfLimits(memory_bytes=64 * 1024 * 1024))
    with pytest.raises(FetchError, match="limits"):
        read_pdf(make_pdf(["x"]), PdfLimits(seconds=0.001))


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


async def test_cancelling_ends_the_process() -> None:
    task = asyncio.create_task(read_pdf_async(make_pdf(["text " * 2000] * 5000), PdfLimits()))
    me = psutil.Process()
    while not (children := [child for child in me.children() if "pdf_worker.py" in command_of(child)]):
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_worker_sees_nothing_of_the_host_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    seen = tmp_path / "show.py"
    seen.write_text("import os; print(sorted(os.environ))")
    output = Worker(str(seen), (), b"", 10).output()
    assert b"PYTHONIOENCODING" in output and b"SECRET" not in output


def test_ordinary_pages_are_not_risky_and_these_are() -> None:
    assert not is_risky("<p><b>x</b> <a href=y>z</a></p>" * 500)
    assert is_risky("<p>" * 30_000)
    assert is_risky("<b>" * 5000 + "<p>x" * 5000)
    assert is_risky("<p>" + "x" * 2_000_001)
    assert not is_risky("<p title='" + "word " * 800 + "' class=x>" * 500)


@pytest.mark.parametrize(
    "source",
    [
        "<y>" * 19_000 + "</x>" * 480_000,  # each end looks through all that is open
        "<select>" + "<option>x" * 19_000,  # each choice is compared with all before it
        "<select>" + "<OPTGROUP label=x>" * 19_000,
        "".join(f"<b id={n}>" for n in range(19_000)),  # and each open formatting element too
    ],
)
def test_what_costs_much_with_few_tags_is_risky(source: str) -> None:
    assert is_risky(source)


CROWDS = {
    "with values": " ".join(f"a{n}=x" for n in range(300_000)),
    "without": " ".join(f"a{n}" for n in range(300_000)),
    "quoted": "".join(f'a{n}="v>"' for n in range(300_000)),
    "behind a quotation mark that opens nothing": 'a==" ' + " ".join(f"a{n}" for n in range(300_000)) + ' z=">"',
}


@pytest.mark.parametrize("name", CROWDS)
async def test_a_tag_with_very_many_attributes_is_read_with_its_first(name: str) -> None:
    """All of them would take minutes of cpu."""
    source = f'<p id=here {CROWDS[name]}>hello</p><p title="{"long " * 2000}">more</p>'
    assert is_risky(source)
    shown = await to_page(Bytes("https://e.example/", "text/html", None, source.encode()), RenderLimits(seconds=30))
    assert shown.text.endswith("hello\n\nmore") and shown.anchors == {"here": 2}


def test_attributes_hidden_from_counting_by_a_quotation_mark_in_a_comment_are_seen_all_the_same() -> None:
    assert is_risky('<!-- <x y=" --><p ' + CROWDS["without"][:20_000] + ' z=">">hello</p>')


@pytest.mark.parametrize(
    "source",
    [
        "<div>" * 400_000 + "deep",
        "<ul><li>a" * 30_000,
        "<p>" + "".join(f"<font color={n}>" for n in range(3000)) + "</p>" + "<p>x" * 9000,
        "<div><marquee></div></marquee>" * 100_000,
        '<!-- <x y=" --><p ' + " ".join(f"a{n}" for n in range(100_000)) + ' z=">">hello</p>',
    ],
)
async def test_pages_made_to_cost_too_much_end_within_the_limits(source: str) -> None:
    document = Bytes("https://e.example/", "text/html", None, source.encode())
    before = psutil.Process().memory_info().rss
    try:
        shown = await to_page(document, RenderLimits(seconds=5))
        assert shown.lines
    except FetchError as error:
        assert "too large or too deeply nested" in str(error)
    assert psutil.Process().memory_info().rss - before < 300_000_000


async def test_a_large_ordinary_page_is_read_in_a_process_with_the_same_result() -> None:
    source = "".join(f"<p id=p{n}>Paragraph <b>{n}</b> <a href='/{n}'>é†</a></p>" for n in range(8000))
    assert is_risky(source)
    shown = await to_page(Bytes("https://e.example/", "text/html", None, source.encode()), RenderLimits())
    assert len(shown.links) == 8000 and shown.links[7999] == "https://e.example/7999"
    assert shown.text.endswith("\n\nParagraph 7999 【7999†é‡】") and shown.anchors["p1"] == 4
