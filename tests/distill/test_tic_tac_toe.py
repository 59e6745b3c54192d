"""Tic-tac-toe against its obvious version: rules, and players that are what they say."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from distill.envs.games.tic_tac_toe import (
    FREE,
    PerfectPlayer,
    RandomPlayer,
    TicTacToe,
    TicTacToeGames,
    free_squares,
    value,
    winner,
)
from distill.envs.games.two_player import IllegalMove
from distill.errors import ConfigError
from tests.refusals import refuses


def play(first, second, game: TicTacToe | None = None) -> TicTacToe:
    game = game or TicTacToe()
    while game.scores is None:
        game.move((first, second)[game.to_move](game))
    return game


def slow_lines(board: str) -> set[str]:
    """The marks that have a line."""
    rows = [board[i : i + 3] for i in (0, 3, 6)]
    lines = rows + ["".join(column) for column in zip(*rows, strict=True)]
    lines += ["".join(rows[i][i] for i in range(3)), "".join(rows[i][2 - i] for i in range(3))]
    return {mark for mark in "XO" if mark * 3 in lines}


def test_lines_win() -> None:
    for marks in product("XO.", repeat=9):
        board = "".join(marks)
        lines = slow_lines(board)
        if len(lines) < 2:  # both have one: no game gets there
            assert winner(board) == (None if not lines else "XO".index(lines.pop()))


def test_a_game_by_hand() -> None:
    game = TicTacToe()
    for move in ("5", "1", "square 3", "2", "7"):
        assert game.scores is None
        game.move(move)
    assert game.board == "OOX.X.X.." and game.scores == (1.0, -1.0)
    assert game.view(1) == "O\nOOX\n.X.\nX.."


@pytest.mark.parametrize("text", ["", "x", "0", "10", "5", "1 2", "٣x", "-"])
def test_what_is_no_move(text: str) -> None:
    game = TicTacToe("....X....")
    with pytest.raises(IllegalMove):
        game.move(text)
    assert game.board == "....X...."


def test_nobody_beats_the_perfect_player() -> None:
    assert value(FREE * 9) == 0
    for seed in range(60):
        perfect, other = PerfectPlayer(seed), RandomPlayer(1000 + seed)
        as_first, as_second = play(perfect, other).scores, play(other, perfect).scores
        assert as_first is not None and as_first[0] >= 0
        assert as_second is not None and as_second[1] >= 0
        assert play(perfect, PerfectPlayer(seed + 7)).scores == (0.0, 0.0)


def test_random_players_differ_by_their_seeds_alone() -> None:
    boards = [play(RandomPlayer(s), RandomPlayer(s + 1)).board for s in (0, 0, 1, 2, 3)]
    assert boards[0] == boards[1] and len(set(boards)) > 2
    wins = [play(RandomPlayer(s), RandomPlayer(s + 500)).scores for s in range(300)]
    assert 0.5 < np.mean([score == (1.0, -1.0) for score in wins]) < 0.68  # 58.5 % in the long run


def test_openings_follow_their_number() -> None:
    config = TicTacToeGames(random_moves=3)
    boards = [config.new_game(opening).board for opening in range(50)]
    assert boards == [config.new_game(opening).board for opening in range(50)]
    assert {9 - len(free_squares(board)) for board in boards} == {0, 1, 2, 3}
    assert {TicTacToeGames(random_moves=0).new_game(opening).board for opening in range(9)} == {
        FREE * 9
    }


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"random_moves": 5}, "env.random_moves"),
        ({"games": 0}, "env.games"),
        ({"forfeit_reward": -0.5}, "env.forfeit_reward"),
        ({"forfeit_reward": float("nan")}, "env.forfeit_reward"),
        ({"opponent": "perfekt"}, "env.opponent"),
        ({"opponent": "reference"}, "env.opponent"),
        ({"opponent_temperature": 0.5}, "env.opponent"),
        ({"eval_opponent": "nobody"}, "env.eval_opponent"),
    ],
)
def test_settings_out_of_range(settings: dict, field: str) -> None:
    with refuses(ConfigError, field):
        TicTacToeGames(**settings)


def test_both_seats_need_an_even_group() -> None:
    TicTacToeGames(opponent="random").check_group(3)
    with refuses(ConfigError, "group_size"):
        TicTacToeGames().check_group(3)
