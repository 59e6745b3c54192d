"""Environments that need a network: a judge's rewards, tools of MCP servers."""
