"""Two-player games of the textarena library, with the library's rules.

    env=distill.envs.games.textarena_game:TextArena env.game=TicTacToe-v0

Needs the extra `textarena`. A seat sees the observations of the library's wrappers. If an
observation extends the previous one, the seat's next message is only the new part. Otherwise, as in
games named `...-train`, the observation replaces the seat's history.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import chz
import numpy as np

from distill.envs.games.two_player import SEATS, Game, IllegalMove, Player, TwoPlayerConfig
from distill.errors import ConfigError, DataError
from distill.libraries import require_library
from distill.lookup import known_names
from distill.settings import with_default

# Games that list their moves do so in one line: "Available Moves: '[0]', '[4]'".
_HEAD = r"\b(?:available|valid|legal) (?:moves|actions)"
# The last head of a line, so that a line of many heads is read once.
_LISTED = re.compile(rf"{_HEAD}(?:(?!{_HEAD})[^:\n])*+:(.*)", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
# Largest number of players of any game in the library.
_MOST_PLAYERS = 15


class TextArenaGame(Game):
    """A game of the library, started from a seed.

    If the library lets a player repeat an invalid move, the same player moves again. If it ends the
    game instead, `move` raises `IllegalMove`, and the table's penalty replaces the library's score.

    Raises:
        ConfigError: the library is not installed, or has no such two-player game that works here.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._random = random.Random(seed).getstate()
        self._scores: tuple[float, float] | None = None
        self._said = [""] * SEATS
        with self._own_random():
            self._env = _begin(name, SEATS, seed)
        self._look()

    @property
    def to_move(self) -> int:
        return self._to_move

    @property
    def scores(self) -> tuple[float, float] | None:
        return self._scores

    @property
    def rules(self) -> str:
        return ""  # the library's first observation includes them

    @property
    def moves(self) -> tuple[str, ...]:
        """Moves that the game lists for the seat to move; empty if it lists none."""
        return self._moves

    def view(self, seat: int) -> str:
        assert seat == self._to_move, "the library shows a seat only its own turns"
        return self._view

    def replaces_history(self, seat: int) -> bool:
        return self._replaces_history

    def move(self, text: str) -> None:
        seat = self._to_move
        flagged = self._invalid(seat)
        with self._own_random():
            done, _ = self._env.step(text.strip())
            if not done:
                self._look()
                return
            rewards, _ = self._env.close()
        if self._invalid(seat) and not flagged:
            raise IllegalMove(f"{text[:40]!r} is not a move of {self._name}")
        self._scores = float(rewards[0]), float(rewards[1])

    def _look(self) -> None:
        """Read and store the observation of the seat to move, which the library returns once."""
        state: Any = self._env.state
        self._moves = _listed(state.observations.get(state.current_player_id, ()))
        self._to_move, seen = self._env.get_observation()
        if not isinstance(seen, str):  # a game without wrappers: `...-raw`
            seen = "\n".join(message for _, message, _ in seen)
            self._view, self._replaces_history = seen, False
            return
        before = self._said[self._to_move]
        self._said[self._to_move] = seen
        self._replaces_history = not seen.startswith(before)
        self._view = seen if self._replaces_history else seen[len(before) :].lstrip("\n")

    def _invalid(self, seat: int) -> bool:
        """True if the library has recorded an invalid move of the seat."""
        return bool(self._env.state.game_info.get(seat, {}).get("invalid_move"))

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Use this game's state of Python's global generator, which the library draws from and
        seeds: games in one process would otherwise share it."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)

    def __reduce__(self) -> tuple[Callable[..., TextArenaGame], tuple[str, int]]:
        return type(self), (self._name, self._seed)


def _library() -> Any:
    require_library("textarena", "env=TextArena", "isotherm[textarena]", "env")
    import textarena

    return textarena


def _begin(name: str, players: int, seed: int) -> Any:
    """Start a game of the library.

    Raises:
        ConfigError: see `TextArenaGame`.
    """
    library = _library()
    known = library.envs.registration.ENV_REGISTRY
    if name not in known:
        raise ConfigError(
            f"env.game={name} is not a game of textarena {library.__version__}; "
            f"{known_names(name, known)}"
        )
    try:
        return _made(library, name, players, seed)
    except Exception as error:  # games of the library raise errors of any kind
        takes = _players(library, name, seed)
        if takes:
            raise ConfigError(
                f"env.game={name} is a game for {takes}, not for {players}; choose one for two"
            ) from error
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"env.game={name} cannot be played here: {why}. Word games need "
            "`python -m nltk.downloader words averaged_perceptron_tagger_eng`, some games a newer "
            "Python or a judge on OpenRouter; provide it, or choose another game"
        ) from error


def _made(library: Any, name: str, players: int, seed: int) -> Any:
    env = library.make(name)
    env.reset(num_players=players, seed=seed)
    return env


def _players(library: Any, name: str, seed: int) -> str:
    """Numbers of players with which the game starts, as text; empty: none."""
    takes: list[int] = []
    for players in range(1, _MOST_PLAYERS + 1):
        with suppress(Exception):  # as in _begin
            _made(library, name, players, seed)
            takes.append(players)
    if not takes:
        return ""
    if takes[0] != takes[-1]:
        return f"{takes[0]} to {takes[-1]} players"
    return "1 player" if takes == [1] else f"{takes[0]} players"


def _listed(messages: Any) -> tuple[str, ...]:
    """Moves listed in the newest messages, except in the rules and in the players' messages."""
    spoken = ("PROMPT", "PLAYER_ACTION")
    text = "\n".join(message for _, message, kind in messages if kind.name not in spoken)
    lists = _LISTED.findall(text)
    return tuple(dict.fromkeys(_MOVE.findall(lists[-1]))) if lists else ()


class RandomMover:
    """Uniformly random player over the moves that the game lists.

    Raises:
        DataError: the game lists no moves at this point.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, game: Game) -> str:
        assert isinstance(game, TextArenaGame)
        if not game.moves:
            raise DataError(
                "env.opponent=random: the game lists no moves to choose from at this point; "
                "give env.opponent=self env.eval_opponent=self"
            )
        return str(self._rng.choice(game.moves))


@chz.chz
class TextArena(TwoPlayerConfig):
    """env=TextArena: the policy plays itself (opponent=self), or random listed moves."""

    game: str = chz.field(
        default="TicTacToe-v0",
        doc="two-player game of the library textarena, such as ConnectFour-v0 or Othello-v0",
    )
    # Games differ in length; a player who has no turns left forfeits.
    max_turns: int = with_default(TwoPlayerConfig, "max_turns", 64)

    @chz.validate
    def _rules_are_given(self) -> None:
        if not self.rules:
            raise ConfigError(
                "env.rules=False changes nothing here: the game's own first observation states its "
                "rules; leave it out"
            )

    @chz.validate
    def _lists_moves(self) -> None:
        listed = self.new_game(0).moves
        for name in ("opponent", "eval_opponent"):
            if getattr(self, name) == "random" and not listed:
                raise ConfigError(
                    f"env.{name}=random: {self.game} does not list its moves, so only the "
                    f"policy can play it; give env.{name}=self"
                )

    def players(self) -> Mapping[str, Callable[[int], Player]]:
        return {"random": RandomMover}

    def new_game(self, opening: int) -> TextArenaGame:
        return TextArenaGame(self.game, opening)
