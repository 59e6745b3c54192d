"""Store of kept groups, `out/groups/`: delivered groups, groups for inspection, whole steps."""
