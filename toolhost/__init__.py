"""toolhost: an MCP tool host whose Python remembers.

The host and what talks to it. Sandboxes themselves live in the sibling package `sandboxes`.
"""

__version__ = "0.1.0"
