"""The text browser: pages, links, find, fetching. It knows nothing of MCP or of an HTTP server.

`toolhost.browsing.browser.Browser` is the way in; `toolhost.browsing.state.BrowserState` is what a session keeps.
"""
