"""Makes the o200k_base vocabulary file that openai_harmony reads, from the npm package js-tiktoken (MIT).

usage: vocabulary.py PACKAGE.tgz OUTPUT_DIRECTORY

That package carries the ranks as text: rows of "_ offset token token …", tokens in base64. The result is checked
against the digest that openai_harmony itself expects.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import sys
import tarfile

SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def rank_rows(package: pathlib.Path) -> list[str]:
    with tarfile.open(package) as archive:
        member = archive.extractfile("package/dist/ranks/o200k_base.cjs")
        assert member is not None
        source = member.read().decode()
    found = re.search(r"bpe_ranks\"?\s*:\s*([\"'`])(.*?)\1", source, re.S)
    if found is None:
        raise SystemExit("js-tiktoken's file has another form than expected")
    return [row for row in found.group(2).replace("\\n", "\n").split("\n") if row.strip()]


def vocabulary(rows: list[str]) -> bytes:
    ranked: list[tuple[int, str]] = []
    for row in rows:
        _, offset, *tokens = row.split(" ")
        ranked += [(int(offset) + index, token) for index, token in enumerate(tokens)]
    return "".join(f"{token} {rank}\n" for rank, token in sorted(ranked)).encode()


def main() -> None:
    package, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    blob = vocabulary(rank_rows(package))
    if hashlib.sha256(blob).hexdigest() != SHA256:
        raise SystemExit("the vocabulary differs from the one that openai_harmony expects")
    target.mkdir(parents=True, exist_ok=True)
    (target / "o200k_base.tiktoken").write_bytes(blob)


if __name__ == "__main__":
    main()
