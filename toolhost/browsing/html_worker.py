"""Runs alone in a process of its own: an HTML document on standard input, its text as JSON on standard output."""

import json
import resource
import sys
from pathlib import Path


def main(memory_bytes: int, cpu_seconds: int, url_length: int) -> int:
    """Print title, body, links and anchors. The first `url_length` bytes of the input are the URL and the schemes."""
    # Started by path and isolated, so the package is not importable by itself.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from toolhost.browsing.crowds import without_crowds
    from toolhost.browsing.html import render_html

    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    data = sys.stdin.buffer.read()
    url, *schemes = json.loads(data[:url_length])
    page = render_html(without_crowds(data[url_length:].decode("utf-8")), url, schemes=frozenset(schemes))
    json.dump([page.title, page.body, page.links, dict(page.anchors)], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
