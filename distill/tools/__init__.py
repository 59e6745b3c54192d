"""Tools that a policy may call between its turns, and the execution of its calls."""
