"""Tools: what a policy may call between its turns, and how its calls are run."""
