"""A sandbox for untrusted programs, and calls with a time limit in a child process or thread."""
