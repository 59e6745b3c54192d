"""Tic-tac-toe against a naive version: rules and players."""

import pytest

from distill.envs.games.tic_tac_toe import (
    FREE,
    PerfectPlayer,
    RandomPlayer,
    TicTacToe,
    TicTacToeGames,
    free_squares,
    value,
)
from distill.errors import ConfigError
from tests.refusals import refuses


def play(first, second, game: TicTacToe | None = None) -> TicTacToe:
    game = game or TicTacToe()
    while game.scores is None:
        game.move((first, second)[game.to_move](game))
    return game


def test_a_game_by_hand() -> None:
    game = TicTacToe()
    for move in ("5", "1", "square 3", "2", "7"):
        assert game.scores is None
        game.move(move)
    assert game.board == "OOX.X.X.." and game.scores == (1.0, -1.0)
    assert game.view(1) == "O\nOOX\n.X.\nX.."


def test_the_perfect_player_is_never_beaten() -> None:
    assert value(FREE * 9) == 0
    for seed in range(60):
        perfect, other = PerfectPlayer(seed), RandomPlayer(1000 + seed)
        as_first, as_second = play(perfect, other).scores, play(other, perfect).scores
        assert as_first is not None and as_first[0] >= 0
        assert as_second is not None and as_second[1] >= 0
        assert play(perfect, PerfectPlayer(seed + 7)).scores == (0.0, 0.0)


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
        ({"opponent": "perfekt"}, "env.opponent"),
        ({"opponent": "reference"}, "env.opponent_temperature"),
        ({"eval_opponent": "nobody"}, "env.eval_opponent"),
    ],
)
def test_settings_out_of_range(settings: dict, field: str) -> None:
    with refuses(ConfigError, field):
        TicTacToeGames(**settings)


def test_both_seats_need_an_even_group() -> None:
    TicTacToeGames(opponent="random").check_group(3)
    with refuses(ConfigError, "sampling.group_size"):
        TicTacToeGames().check_group(3)
