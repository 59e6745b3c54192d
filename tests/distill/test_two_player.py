"""Two-player games with scripted policies: turns, rewards and deadlocks."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from distill.engine import GenerateRequest, Sample
from distill.envs.base import Episode
from distill.envs.games.tic_tac_toe import (
    FREE,
    PerfectPlayer,
    RandomPlayer,
    TicTacToe,
    TicTacToeGames,
    free_squares,
    value,
)
from distill.errors import ConfigError, EngineError
from distill.types import StopReason
from examples.show.chat_worlds import SQUARES_APART, game_rows
from tests.refusals import refuses
from tests.scripted import Script, Scripted, game_metrics, play_game, setting, trained_tokenizer

TOKENIZER = trained_tokenizer(game_rows(40, blunders=0.3), SQUARES_APART)

BOARD = re.compile(r"[.XO]{3}\n[.XO]{3}\n[.XO]{3}")


def board_of(seen: str) -> str:
    """Last board that a player was shown."""
    return BOARD.findall(seen)[-1].replace("\n", "")


def first_free(_turn: int, seen: str) -> str:
    return str(free_squares(board_of(seen))[0] + 1)


def play(
    policy: Scripted,
    *,
    group_size: int = 2,
    models: Mapping[str, Scripted] | None = None,
    **settings: Any,
) -> list[Episode]:
    config = TicTacToeGames(random_moves=0, **settings)
    room = setting(TOKENIZER, max_new_tokens=8)
    return play_game(config, room, policy, group_size=group_size, models=models)


def scripted(script: Script, **settings: Any) -> tuple[list[Episode], Scripted]:
    policy = Scripted(TOKENIZER, script)
    return play(policy, **settings), policy


def test_both_seats_are_episodes_of_one_game() -> None:
    """With the first free squares X has 1, 3, 5, 7: a diagonal."""
    (first, second), policy = scripted(first_free)
    assert (len(first.turns), len(second.turns)) == (4, 3)
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.metrics == game_metrics(won=1)
    assert first.stop_reason is second.stop_reason is StopReason.DONE
    boards = [board_of(seen) for seen in policy.seen]
    assert boards[0] == FREE * 9 and len(set(boards)) == 7  # every move saw another board
    assert "tic-tac-toe" in policy.seen[0] and policy.seen[0].count("tic-tac-toe") == 1


def test_a_group_plays_as_many_games_as_it_has_pairs() -> None:
    episodes, policy = scripted(first_free, group_size=6)
    assert [episode.reward for episode in episodes] == [1.0, -1.0] * 3
    assert policy.requests[0].num_samples == 3  # the three that begin see the same board


def test_an_illegal_move_loses_and_wins_nothing() -> None:
    def second_blunders(turn: int, seen: str) -> str:
        return "1" if turn == 1 else first_free(turn, seen)

    (first, second), _ = scripted(second_blunders)
    assert (first.reward, second.reward) == (0.0, -2.0)
    assert second.metrics == game_metrics(illegal=1)
    assert first.metrics == game_metrics()


def test_a_game_of_the_policy_alone_is_a_draw_at_the_limit_on_turns() -> None:
    for episode in scripted(first_free, max_turns=2)[0]:
        assert len(episode.turns) == 2 and episode.stop_reason is StopReason.TURNS
        assert episode.reward == 0.0 and episode.metrics == game_metrics() | {"drawn": 1}


def test_a_seat_without_a_turn_left_forfeits_to_another_player() -> None:
    for episode in scripted(first_free, max_turns=1, opponent="random")[0]:
        assert episode.stop_reason is StopReason.TURNS and episode.reward == -2.0
        assert episode.metrics == game_metrics(illegal=1)


def test_a_limit_on_one_seat_frees_the_other() -> None:
    (first, second), _ = scripted(first_free, time_s=1e-9)
    assert first.stop_reason is StopReason.TIME and first.reward == -2.0
    assert first.metrics == game_metrics(illegal=1)
    assert second.reward == 0.0 and second.stop_reason is StopReason.DONE
    assert second.metrics == game_metrics()


def test_a_frozen_model_sits_opposite() -> None:
    """The opponent has its own conversation and temperature, and is no member of the group."""
    config = TicTacToeGames(random_moves=0, opponent="reference", opponent_temperature=0.0)
    assert (
        list(config.queried_models) == ["reference"] and list(TicTacToeGames().queried_models) == []
    )
    policy, frozen = Scripted(TOKENIZER, first_free), Scripted(TOKENIZER, first_free)
    episodes = play_game(
        config, setting(TOKENIZER, max_new_tokens=8), policy, models={"reference": frozen}
    )
    assert [episode.reward for episode in episodes] == [1.0, 1.0]
    assert [len(episode.turns) for episode in episodes] == [4, 4]
    assert len(frozen.seen) == 2 * 3
    assert {request.sampling.temperature for request in frozen.requests} == {0.0}
    assert all(seen.count("tic-tac-toe") == 1 for seen in [*policy.seen, *frozen.seen])


def test_a_frozen_model_may_lose_by_an_illegal_move() -> None:
    frozen = Scripted(TOKENIZER, lambda _turn, _seen: "none")
    [episode], _ = scripted(
        first_free, group_size=1, models={"reference": frozen},
        opponent="reference", opponent_temperature=0.7,
    )  # fmt: skip
    assert episode.reward == 0.0 and episode.metrics["illegal"] == 0.0


def test_a_failing_engine_ends_the_group() -> None:
    class Fails(Scripted):
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            if self.seen:
                raise EngineError("gone")
            return await super().generate(request)

    with pytest.raises(EngineError):
        play(Fails(TOKENIZER, first_free), group_size=4)


def play_out(first, second, game: TicTacToe | None = None) -> TicTacToe:
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
        as_first, as_second = play_out(perfect, other).scores, play_out(other, perfect).scores
        assert as_first is not None and as_first[0] >= 0
        assert as_second is not None and as_second[1] >= 0
        assert play_out(perfect, PerfectPlayer(seed + 7)).scores == (0.0, 0.0)


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
