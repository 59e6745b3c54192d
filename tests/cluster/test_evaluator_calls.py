"""Evaluators that die or hang in user code, on real Ray actors: two attempts, then an error."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.rollout.user_code_file import problems_in_user_code
from cluster.base.outcomes import RunFailed
from cluster.placement.roles import EVALUATOR
from cluster.runtime.driver import Driver, Signals
from cluster.runtime.evaluator_calls import EvaluatorCalls
from cluster.supervision.supervise import HEALTH_GROUP, ActorSpec, Supervisor, ready_call
from tests.cluster.stuck_evaluator import StuckEvaluator
from tests.waiting import DEADLINE_S

# Deadlines of calls; a start takes seconds on a busy machine.
HANGS_S, DIES_S = 15.0, 120.0


class House:
    """A driver, its supervisor, and an evaluator."""

    def __init__(self, directory: Path, deadline_s: float) -> None:
        self.inside, self.spared = str(directory / "inside"), str(directory / "spared")
        self.lines: list[str] = []
        self.made = 0
        self.supervisor = Supervisor(
            print_line=self.lines.append, record=lambda _event, **_fields: None,
            on_death=lambda _member, _why: None,
            hang_after_s=deadline_s / 2, max_restarts=9,
        )  # fmt: skip
        self.driver = Driver(supervisor=self.supervisor, signals=Signals(), deadline_s=deadline_s)
        self.calls = EvaluatorCalls(self.driver)
        role = ActorSpec(
            name=EVALUATOR, title=lambda _index: EVALUATOR, create=self.create,
            heartbeat=ready_call, death_details=self.death_details, start_deadline_s=DEADLINE_S,
        )  # fmt: skip
        self.supervisor.add(role, 0)
        self.supervisor.run_started = True

    def create(self, _index: int, _attempt: int) -> Any:
        self.made += 1
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={HEALTH_GROUP: 1})(StuckEvaluator)
        return actor_class.options(num_cpus=0).remote(self.inside)

    def death_details(self) -> str:
        inside = problems_in_user_code(self.inside)
        return f", in the code of {inside} of env=Bad" if inside else ""

    def ask(self, make: Callable[[Any], Any]) -> str:
        return self.driver.wait_for(self.calls.ask("evaluation", make))


@pytest.fixture
def house(ray_cluster: None, tmp_path: Path, deadline_s: float) -> Iterator[House]:
    made = House(tmp_path, deadline_s)
    yield made
    made.supervisor.end_all()
    made.driver.background.close()


@pytest.mark.parametrize(
    ("way", "deadline_s"),
    [
        ("dies", DIES_S),
        pytest.param("waits", HANGS_S, marks=pytest.mark.slow),
        pytest.param("holds the interpreter", HANGS_S, marks=pytest.mark.slow),
    ],
)
def test_a_second_death_in_the_same_code_ends_the_run_and_names_it(house: House, way: str) -> None:
    with pytest.raises(RunFailed) as failed:
        house.ask(lambda evaluator: evaluator.evaluate.remote(way, house.spared))
    assert "2 times, in the code of [1] of env=Bad" in str(failed.value)
    assert house.made == 2
    assert sum("evaluator died (" in line and "code of [1]" in line for line in house.lines) == 2


@pytest.mark.parametrize("deadline_s", [DIES_S])
def test_a_single_death_in_user_code_is_forgiven(house: House) -> None:
    def ask(evaluator: Any) -> Any:
        if house.made < 3:
            return evaluator.die_in_no_code.remote()
        return evaluator.evaluate.remote("dies", house.spared)

    Path(house.spared).touch()
    assert house.ask(ask) == "well"
    assert house.made == 3
    assert not any("in the code of" in line for line in house.lines)
