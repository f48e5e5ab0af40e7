"""The C half of `os`: the module around it makes abstract classes, which takes 1 ms and 160 kB.

Above: everything in the agent that every sandbox loads. What the other half has is not here: `environ` as text, `path`,
`fsencode`, `execvpe`, `fdopen`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
else:
    import posix as os

__all__ = ["os"]
