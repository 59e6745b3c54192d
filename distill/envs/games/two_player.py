"""Games for two players: each seat is a separate episode, and the policy may play both.

    table      holds the game; each seat waits at it for its turn, or for the end of the game
    seats      with opponent=self, the policy plays both seats (G / 2 games per group); any other
               opponent plays against the policy (G games) and is not trained

A win earns 1, a loss -1, a draw 0. An illegal move loses immediately and earns `forfeit_reward`;
the other seat then earns nothing. The same holds for a seat that a limit ends. But if the policy
plays both seats, a game that reaches the limit on turns is a draw: the first seat reaches it first.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import chz

from distill.chat.conversation import Conversation
from distill.chat.template import Message
from distill.data.feedback import FeedbackContext
from distill.engine import GenerateRequest, SamplingModel
from distill.envs.base import Env, EnvConfig, EnvContext, EnvDataset, EnvGroupBuilder, only_teacher
from distill.envs.chat import ChatEnv, ChatSetting, MessageEnv, MessageStep
from distill.envs.chat_config import ChatConfig, first_length, require_room
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.rules import IN_MEMORY, at_least, at_most, needs, setting
from distill.sampling import EvalSampling
from distill.types import StopReason

SEATS = 2


class IllegalMove(Exception):
    """Raised for a text that is not a legal move."""


class Game(ABC):
    """A game in progress and its rules. Seats are 0 and 1; it must pickle before its first move."""

    @property
    @abstractmethod
    def to_move(self) -> int: ...

    @property
    @abstractmethod
    def scores(self) -> tuple[float, float] | None:
        """Rewards of the two seats; None until the game has ended."""

    @property
    @abstractmethod
    def rules(self) -> str:
        """The rules, shown before a player's first move; empty if its first view includes them."""

    @abstractmethod
    def view(self, seat: int) -> str:
        """The position as a player sees it before each of its moves."""

    def replaces_history(self, seat: int) -> bool:
        """True if the view replaces the history instead of following it."""
        return False

    @abstractmethod
    def move(self, text: str) -> None:
        """Play the text as the move of the seat to move.

        Raises:
            IllegalMove: the text is not a legal move; the game is unchanged.
        """


# Distance between the opponent seeds of consecutive problems (openings).
_OPPONENT_SEED = 1_000

# Function that chooses a move in a game: an opponent that is not trained.
Player = Callable[[Game], str | Awaitable[str]]
# Name of the run's model that may be the opponent: a frozen checkpoint.
FROZEN = "reference"


class Table:
    """A game in progress, shared by its seats. A seat that writes an illegal move forfeits it.

    If given, `max_turns` is the number of turns of each seat after which the game is a draw.
    """

    def __init__(self, game: Game, forfeit_reward: float, max_turns: int | None = None) -> None:
        self.game = game
        self.forfeit_reward = forfeit_reward
        self._turns_left = [max_turns] * SEATS
        self.forfeited_by: int | None = None
        self.fault = ""  # reason why a move is illegal
        self._changed = asyncio.Condition()

    @property
    def scores(self) -> tuple[float, float] | None:
        if self.forfeited_by is None:
            return (0.0, 0.0) if self.is_cut else self.game.scores
        lost = self.forfeit_reward
        return (lost, 0.0) if self.forfeited_by == 0 else (0.0, lost)

    @property
    def is_cut(self) -> bool:
        """True if the seat to move has no turn left."""
        return self.game.scores is None and self._turns_left[self.game.to_move] == 0

    async def play(self, text: str) -> None:
        async with self._changed:
            left = self._turns_left[self.game.to_move]
            if left is not None:
                self._turns_left[self.game.to_move] = left - 1
            try:
                self.game.move(text)
            except IllegalMove as error:
                self.forfeited_by, self.fault = self.game.to_move, str(error)
            self._changed.notify_all()

    async def leave(self, seat: int) -> None:
        """Forfeit the game if it has not ended, and wake the other seat."""
        async with self._changed:
            if self.scores is None:
                self.forfeited_by = seat
            self._changed.notify_all()

    async def turn_of(self, seat: int) -> bool:
        """Wait for the seat's turn. Returns False if the game has ended."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.scores is not None or self.game.to_move == seat
            )
            return self.scores is None


class Seat(MessageEnv):
    """The policy on one seat of a table. An `opponent` that is not in the group plays the other."""

    ends_when_cut = True  # moves are short, so a truncated turn loses

    def __init__(
        self, table: Table, seat: int, opponent: Player | None, *, rules: bool = True
    ) -> None:
        self._table, self._seat, self._opponent = table, seat, opponent
        self._rules = rules
        self.starts = opponent is not None or table.game.to_move == seat

    async def start(self, models: Mapping[str, SamplingModel]) -> None:
        await self._next_turn()

    def initial_messages(self) -> Sequence[Message]:
        if self._table.scores is not None:
            return ()
        return _shown(self._table.game, self._seat, rules=self._rules)

    async def step(self, message: Message) -> MessageStep:
        await self._table.play(str(message.get("content") or ""))
        if await self._next_turn():
            game = self._table.game
            return MessageStep(
                messages=_shown(game, self._seat),
                replaces_history=game.replaces_history(self._seat),
            )
        return self._end()

    def _end(self) -> MessageStep:
        scores = self._table.scores
        assert scores is not None, "the game has not ended, but no player has the turn"
        score = scores[self._seat]
        return MessageStep(
            reward=score,
            stop_reason=StopReason.TURNS if self._table.is_cut else StopReason.DONE,
            metrics={
                "won": float(score > 0),
                "drawn": float(score == 0 and self._table.forfeited_by is None),
                "illegal": float(self._table.forfeited_by == self._seat),
            },
            feedback=self._result(score),
        )

    def _result(self, score: float) -> str:
        table = self._table
        if table.forfeited_by == self._seat:
            made = f"an illegal move: {table.fault}" if table.fault else "making no move"
            return f"You lost by {made}."
        if table.forfeited_by is not None:
            return "The other player lost by an illegal move, or by none."
        if table.is_cut:
            return "A draw: the limit on turns ended the game."
        return "You won." if score > 0 else "You lost." if score < 0 else "A draw."

    async def unfinished(self) -> MessageStep:
        await self._table.leave(self._seat)
        return self._end()

    async def _next_turn(self) -> bool:
        table = self._table
        while self._opponent and table.scores is None and table.game.to_move != self._seat:
            move = self._opponent(table.game)
            await table.play(move if isinstance(move, str) else await move)
        return await table.turn_of(self._seat)


def _shown(game: Game, seat: int, *, rules: bool = False) -> list[Message]:
    """The messages that a player sees before a move; the rules come first if `rules`."""
    view = game.view(seat)
    if rules and game.rules:
        view = f"{game.rules}\n\n{view}"
    return [{"role": "user", "content": view}]


@dataclass(slots=True, eq=False)
class FrozenPlayer:
    """Player that samples a frozen model, which sees its own seat's view, as the policy does."""

    model: SamplingModel
    setting: ChatSetting
    sampling: EvalSampling
    seed: int
    rules: bool
    _conversation: Conversation | None = field(init=False, default=None)

    async def __call__(self, game: Game) -> str:
        """The model's move; empty, which is illegal, if its context has no room for a turn."""
        if self._conversation is None:
            shown = _shown(game, game.to_move, rules=self.rules)
            self._conversation = Conversation(self.setting.tokenizer, shown)
        elif game.replaces_history(game.to_move):
            self._conversation.replace(_shown(game, game.to_move))
        else:
            self._conversation.add_messages(_shown(game, game.to_move))
        prompt_tokens_T = self._conversation.observation_T
        if len(prompt_tokens_T) >= self.setting.limits.max_tokens:
            return ""
        self.seed += 1
        request = GenerateRequest(
            prompt_tokens_T=prompt_tokens_T,
            sampling=self.sampling,
            num_samples=1,
            seed=self.seed,
        )
        [sample] = await self.model.generate(request)
        self._conversation.add_sample(sample)
        return self._conversation.response.answer


@dataclass(frozen=True, kw_only=True)
class TableGroupBuilder(EnvGroupBuilder):
    """Builder of the seats of a group, all on games with the same opening.

    Attributes:
        opening: number of the opening; the policy's seat alternates with it if it has an opponent.
        max_new_tokens: length of the longest turn, also of an opponent.
    """

    config: TwoPlayerConfig
    opening: int
    setting: ChatSetting
    group_size: int
    max_new_tokens: int

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        seats: list[Seat] = []
        rules = self.config.rules
        if self.config.opponent == "self":
            # An evaluation may request one episode, but a game has two.
            for _ in range((self.group_size + 1) // SEATS):
                table = self.config.new_table(self.opening)
                seats += [Seat(table, seat, None, rules=rules) for seat in range(SEATS)]
        else:
            first = _OPPONENT_SEED * self.opening
            for seed in range(first, first + self.group_size):
                table = self.config.new_table(self.opening)
                opponent = self.config.new_opponent(seed, models, self.setting, self.max_new_tokens)
                seats.append(Seat(table, self.opening % SEATS, opponent, rules=rules))
        return [ChatEnv(seat, self.setting, models) for seat in seats]


class TableDataset(EnvDataset):
    """Dataset of openings."""

    def __init__(
        self,
        config: TwoPlayerConfig,
        setting: ChatSetting,
        teacher: str,
        feedback: FeedbackContext | None,
        rules_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """`rules_tokens`: number of tokens that a seat sees before its first move."""
        self._config, self._setting = config, setting
        self._teacher, self._feedback = teacher, feedback
        self._rules_tokens, self._max_new_tokens = rules_tokens, max_new_tokens

    def __len__(self) -> int:
        return self._config.games

    def longest_row(self, max_new_tokens: int) -> int:
        return self._setting.limits.longest_row(self._rules_tokens, max_new_tokens)

    def builder(self, problem: int, group_size: int) -> TableGroupBuilder:
        return TableGroupBuilder(
            teacher=self._teacher,
            feedback=self._feedback,
            config=self._config,
            opening=problem,
            setting=self._setting,
            group_size=group_size,
            max_new_tokens=self._max_new_tokens,
        )


@chz.chz
class TwoPlayerConfig(ChatConfig):
    """Settings common to all games for two players."""

    reads_prompts = False
    judges = False

    opponent: str = chz.field(
        default="self",
        doc="opponent in training. self: the policy, with both seats trained; reference: the run's "
        "frozen model reference=DIR; or one of the game's own players",
    )
    opponent_temperature: float | None = setting(
        at_least(0),
        needs("opponent", FROZEN),
        default=None,
        doc="temperature of the moves of opponent=reference; 0: greedy",
    )
    eval_opponent: str = chz.field(
        default="random", doc="opponent in evaluations; same values as opponent, except reference"
    )
    forfeit_reward: float = setting(
        at_most(-1, "a loss is -1"),
        default=-2.0,
        doc="reward of a seat that makes an illegal move or no move; below a loss (-1), so that a "
        "losing seat has a reason to follow the rules",
    )
    rules: bool = chz.field(default=True, doc="state the rules in the first message")
    games: int = setting(
        at_least(1), IN_MEMORY, default=1000, doc="number of different openings (seeds)"
    )

    @chz.validate
    def _opponents_are_known(self) -> None:
        if self.opponent == FROZEN and self.opponent_temperature is None:
            raise ConfigError(
                f"env.opponent={FROZEN} needs env.opponent_temperature=; 0 is greedy",
                field="env.opponent_temperature",
            )
        for name, models in (("opponent", ["self", FROZEN]), ("eval_opponent", ["self"])):
            given, known = getattr(self, name), [*models, *self.players()]
            if given not in known:
                raise ConfigError(
                    f"env.{name}={given} is not a player of this game; {known_names(given, known)}"
                )

    @abstractmethod
    def players(self) -> Mapping[str, Callable[[int], Player]]:
        """Factories of players that are not models, by name; each takes a seed."""

    @abstractmethod
    def new_game(self, opening: int) -> Game:
        """Create a game in its state before the policy's first move."""

    def new_table(self, opening: int) -> Table:
        max_turns = self.max_turns if self.opponent == "self" else None
        return Table(self.new_game(opening), self.forfeit_reward, max_turns)

    def check_group(self, group_size: int) -> None:
        if self.opponent == "self" and group_size % SEATS:
            raise ConfigError(
                f"group_size={group_size} must be even with env.opponent=self: every game has two "
                "trained seats",
                field="sampling.group_size",
            )

    @property
    def queried_models(self) -> Sequence[str]:
        return [FROZEN] if self.opponent == FROZEN else []

    @property
    def metric_names(self) -> Collection[str]:
        return self._counts_and("won", "drawn", "illegal")

    def evaluation(self) -> EnvConfig:
        return chz.replace(self, opponent=self.eval_opponent, opponent_temperature=None)

    def __call__(self, path: str | None, setting: EnvContext) -> TableDataset:
        chat = self.chat_setting(setting)
        table = self.new_table(0)
        seat = Seat(table, table.game.to_move, None, rules=self.rules)
        length = first_length(seat, chat)
        require_room("a game", length, chat, setting.max_new_tokens)
        teacher = only_teacher(setting)
        feedback = setting.feedback_on(seat.initial_messages(), teacher=teacher)
        return TableDataset(self, chat, teacher, feedback, length, setting.max_new_tokens)

    def new_opponent(
        self, seed: int, models: Mapping[str, SamplingModel], chat: ChatSetting, max_new_tokens: int
    ) -> Player:
        """Create the policy's opponent, which is not the policy itself."""
        if self.opponent != FROZEN:
            return self.players()[self.opponent](seed)
        assert self.opponent_temperature is not None
        sampling = EvalSampling(
            temperature=self.opponent_temperature, max_new_tokens=max_new_tokens
        )
        return FrozenPlayer(models[FROZEN], chat, sampling, seed, rules=self.rules)
