"""MCP on the wire: one endpoint per namespace."""
