"""Users of engines: episodes, scoring by teachers, the worker's loop, evaluation."""
