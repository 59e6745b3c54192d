"""Games of the textarena library with scripted policies, played to their ends."""

import pickle
import random
import re
from typing import Any

import pytest

from distill.envs.base import Episode
from distill.envs.games.textarena_game import TextArena, TextArenaGame
from distill.envs.games.two_player import IllegalMove
from distill.errors import ConfigError
from distill.types import StopReason
from tests.refusals import refuses
from tests.scripted import Script, Scripted, chat_tokenizer, game_metrics, play_game, setting

TOKENIZER = chat_tokenizer()

pytest.importorskip("textarena", reason="pip install 'isotherm[textarena]'")

MAX_NEW_TOKENS = 16
LISTED = re.compile(r"Available Moves: (.*)")


def first_listed(_turn: int, seen: str) -> str:
    return re.findall(r"\[\d\]", LISTED.findall(seen)[-1])[0]


def play(
    script: Script, *, problem: int = 0, group_size: int = 2, **settings: Any
) -> tuple[list[Episode], Scripted]:
    policy, config = Scripted(TOKENIZER, script), TextArena(**settings)
    room = setting(TOKENIZER, context_length=4096, max_new_tokens=MAX_NEW_TOKENS)
    return play_game(config, room, policy, problem=problem, group_size=group_size), policy


def test_both_seats_play_the_game_to_its_end() -> None:
    """With the first listed moves, the first seat has 0, 2, 4, 6: a diagonal."""
    (first, second), policy = play(first_listed)
    assert (len(first.turns), len(second.turns)) == (4, 3)
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.metrics == game_metrics(won=1)
    assert set(first.metrics) == set(TextArena().metric_names)
    assert first.stop_reason is second.stop_reason is StopReason.DONE
    assert "You are Player 0" in policy.seen[0] and "You are Player 1" in policy.seen[1]
    assert all(seen.count("You are Player") == 1 for seen in policy.seen)  # the rules, once
    assert policy.seen[-1].count("Available Moves") == 7  # and every board of the game


def test_a_long_game_is_played_to_its_end() -> None:
    """Columns in order, alternating seats: diagonals of one seat win in the fourth row."""
    episodes, _ = play(lambda turn, _: f"[{turn % 7}]", game="ConnectFour-v0", eval_opponent="self")
    assert [episode.stop_reason for episode in episodes] == [StopReason.DONE] * 2
    assert sorted(episode.reward for episode in episodes) == [-1, 1]


@pytest.mark.parametrize("problem", [0, 1])
def test_an_opponent_of_listed_moves(problem: int) -> None:
    episodes, policy = play(first_listed, opponent="random", problem=problem, group_size=4)
    assert len(episodes) == 4
    assert all(episode.metrics["illegal"] == 0 for episode in episodes)
    assert f"You are Player {problem}" in policy.seen[0]


def test_games_draw_from_generators_of_their_own() -> None:
    """Two concurrent games go as they do alone, and the global random state is unchanged."""

    def hands(*games: TextArenaGame) -> list[str]:
        for _ in range(4):
            for game in games:
                game.move("[check]")
        return [game.view(game.to_move) for game in games]

    random.seed(5)
    expected = random.random()
    random.seed(5)
    [alone] = hands(TextArenaGame("KuhnPoker-v0", 1))
    together = hands(TextArenaGame("KuhnPoker-v0", 1), TextArenaGame("KuhnPoker-v0", 2))
    assert together[0] == alone
    assert random.random() == expected


def test_a_game_pickles_before_its_first_move() -> None:
    game = TextArenaGame("KuhnPoker-v0", 3)
    again = pickle.loads(pickle.dumps(game))
    assert again.view(again.to_move) == game.view(game.to_move)


def test_an_invalid_end_is_an_illegal_move() -> None:
    game = TextArenaGame("TicTacToe-v0", 0)
    game.move("nowhere")
    assert game.to_move == 0 and game.scores is None
    with pytest.raises(IllegalMove):
        game.move("nowhere")


def test_an_evaluation_by_self_play_of_one_episode_plays_a_game() -> None:
    episodes, _ = play(first_listed, group_size=1)
    assert len(episodes) == 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"game": "TicTakToe-v0"}, "env.game"),
        ({"game": "Sudoku-v0"}, "env.game"),
        ({"game": "SettlersOfCatan-v0"}, "env.game"),
        ({"game": "CharacterConclave-v0"}, "env.game"),
        ({"game": "BabyAiText-v0"}, "env.game"),
        ({"game": "Nim-v0"}, "env.eval_opponent"),
        ({"opponent": "perfect"}, "env.opponent"),
        ({"rules": False}, "env.rules"),
    ],
)
def test_unusable_games_are_refused(settings: dict[str, object], field: str) -> None:
    with refuses(ConfigError, field):
        TextArena(**settings)  # pyright: ignore[reportArgumentType]
