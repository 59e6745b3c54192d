"""Tic-tac-toe: squares 1 to 9, row by row; three equal marks in a line win."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

import chz
import numpy as np

from distill.envs.games.two_player import Game, IllegalMove, Player, TwoPlayerConfig
from distill.rules import at_least, at_most, setting

MARKS = "XO"
FREE = "."
_LINES = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6),
)  # fmt: skip


class TicTacToe(Game):
    """A board of nine squares, as a string; X moves first."""

    def __init__(self, board: str = FREE * 9) -> None:
        self.board = board

    @property
    def to_move(self) -> int:
        return (9 - self.board.count(FREE)) % 2

    @property
    def scores(self) -> tuple[float, float] | None:
        won = winner(self.board)
        if won is not None:
            return (1.0, -1.0) if won == 0 else (-1.0, 1.0)
        return None if FREE in self.board else (0.0, 0.0)

    @property
    def rules(self) -> str:
        return (
            "Let us play tic-tac-toe. The squares are numbered 1 to 9, row by row from the top "
            f"left; {FREE} is a free one, and three marks in a line win. I show you your mark and "
            "the board; answer with the number of the square that you take, and nothing else."
        )

    def view(self, seat: int) -> str:
        rows = "\n".join(self.board[i : i + 3] for i in (0, 3, 6))
        return f"{MARKS[seat]}\n{rows}"

    def move(self, text: str) -> None:
        digits = re.findall(r"[0-9]+", text)
        if len(digits) != 1 or not 1 <= int(digits[0]) <= 9:
            raise IllegalMove(f"{text[:40]!r} names no square, 1 to 9")
        square = int(digits[0]) - 1
        if self.board[square] != FREE:
            raise IllegalMove(f"square {square + 1} is taken")
        self.board = played(self.board, square)


def winner(board: str) -> int | None:
    """The seat that has a line, or None."""
    for a, b, c in _LINES:
        if board[a] != FREE and board[a] == board[b] == board[c]:
            return MARKS.index(board[a])
    return None


def free_squares(board: str) -> list[int]:
    return [square for square, mark in enumerate(board) if mark == FREE]


def played(board: str, square: int) -> str:
    """The board after the player to move has taken the square."""
    mark = MARKS[(9 - board.count(FREE)) % 2]
    return board[:square] + mark + board[square + 1 :]


@cache
def value(board: str) -> int:
    """Minimax value for the player to move: 1 a win, 0 a draw, -1 a loss."""
    if winner(board) is not None:
        return -1  # the other player has just completed a line
    squares = free_squares(board)
    return max((-value(played(board, square)) for square in squares), default=0)


class RandomPlayer:
    """Player that takes a random free square."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, game: Game) -> str:
        assert isinstance(game, TicTacToe)
        return str(int(self._rng.choice(free_squares(game.board))) + 1)


class PerfectPlayer(RandomPlayer):
    """Player that takes a random square among the best, by minimax search of the whole game."""

    def __call__(self, game: Game) -> str:
        assert isinstance(game, TicTacToe)
        board = game.board
        best = [s for s in free_squares(board) if -value(played(board, s)) == value(board)]
        return str(int(self._rng.choice(best)) + 1)


@chz.chz
class TicTacToeGames(TwoPlayerConfig):
    """env=TicTacToeGames: the policy plays itself (opponent=self), or random or perfect players."""

    random_moves: int = setting(
        at_least(0),
        at_most(4, "after 5 moves the game may already be over"),
        default=2,
        doc="maximum number of random moves in an opening, so that games differ",
    )

    def players(self) -> Mapping[str, Callable[[int], Player]]:
        return {"random": RandomPlayer, "perfect": PerfectPlayer}

    def new_game(self, opening: int) -> TicTacToe:
        rng = np.random.default_rng(opening)
        board = FREE * 9
        for _ in range(int(rng.integers(self.random_moves + 1))):
            board = played(board, int(rng.choice(free_squares(board))))
        return TicTacToe(board)
