"""Untrusted programs in a sandbox, and calls that may not end in a child process."""
