"""What an answer cites: `【3†L9-L11】` in its text as `url_citation` annotations. The text stays as it was streamed.

Above: `service`. Below: `sources`, `browsing.citations`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from toolhost.browsing.citations import CITATION
from toolhost.gateway.errors import ApiError
from toolhost.gateway.sources import CitationSource

log = logging.getLogger("toolhost.gateway")

MAX_CITATIONS = 100
WAIT_S = 10.0


async def cite(source: CitationSource, principal: str, session: str, text: str) -> list[dict[str, Any]]:
    """Annotations of the citations in `text` that lead to a page of the session; offsets in code points, half open.

    An answer does not fail of them: when the pages cannot be reached it has none.
    """
    found = list(CITATION.finditer(text))[:MAX_CITATIONS]
    wanted = list(dict.fromkeys(match.group() for match in found))
    if not wanted:
        return []
    try:
        async with asyncio.timeout(WAIT_S):
            pages = dict(zip(wanted, await source.cited(principal, session, wanted), strict=True))
    except (ApiError, TimeoutError, ValueError) as error:
        log.warning("citations cannot be resolved: %s", error)
        return []
    return [
        {
            "type": "url_citation",
            "start_index": match.start(),
            "end_index": match.end(),
            "url": page.url,
            "title": page.title,
        }
        for match in found
        if (page := pages[match.group()]) is not None
    ]
