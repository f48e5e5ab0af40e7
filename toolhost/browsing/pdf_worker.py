"""Runs alone in a process of its own: a PDF on standard input, one JSON line a page on standard output.

Started by path, so it imports nothing of the host. Limits are set before the document is read; the parent ends it
when its time is up.
"""

import json
import resource
import sys


def main(max_pages: int, max_characters: int, memory_bytes: int, cpu_seconds: int) -> int:
    """Print the number of pages, then each page's text."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    import pypdfium2  # type: ignore[import-untyped]  # before the memory limit: what it maps is not the document's doing

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    data = sys.stdin.buffer.read()
    try:
        document = pypdfium2.PdfDocument(data)
        pages = len(document)
    except pypdfium2.PdfiumError as error:
        print(json.dumps({"error": str(error)}))
        return 0
    title = document.get_metadata_value("Title")
    print(json.dumps({"pages": pages, "title": title}), flush=True)
    left = max_characters
    for index in range(min(pages, max_pages)):
        try:
            page = document[index]
            text = page.get_textpage().get_text_bounded()
            page.close()
        except pypdfium2.PdfiumError:
            text = ""
        # Only bare text goes out: surrogates would not survive the pipe.
        text = text.encode("utf-8", "ignore").decode()[:left]
        left -= len(text)
        print(json.dumps({"text": text}), flush=True)
        if left <= 0:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:5])))
