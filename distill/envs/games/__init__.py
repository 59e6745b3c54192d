"""Games of two: tables and seats, one game, a library's games."""
