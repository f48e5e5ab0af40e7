"""One MCP namespace a module: a tool call in, a result out."""
