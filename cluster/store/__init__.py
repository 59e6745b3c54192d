"""The store of kept groups, `out/groups/`: Arrow files."""
