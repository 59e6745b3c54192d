"""Games for two players: tables and seats, tic-tac-toe, and games of the textarena library."""
