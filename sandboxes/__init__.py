"""Persistent sandboxes for code written by language models.

This package knows nothing of MCP, HTTP servers or models: a session key and a call go in, an outcome comes out.
"""
