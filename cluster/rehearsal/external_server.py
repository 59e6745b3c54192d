"""External teachers in a rehearsal: each scores one canary row; a twin replaces it in the run."""

from __future__ import annotations

import asyncio

from actors.sglang.external import ExternalSglangEngine
from distill.engine import EngineInfo
from distill.errors import EngineError, IsothermError
from distill.handshake.canary import CanaryRows, CanaryScores, first_fault

# Deadline of all calls to one server; a server that is slower would delay every step.
_DEADLINE_S = 60.0


def check_server(
    url: str,
    temperature: float,
    *,
    given: int,
    top_k: int,
    states: bool,
    deadline_s: float = _DEADLINE_S,
) -> tuple[bool, str]:
    """Score one canary row at T and 1.5 T on a server, with the requests of training.

    Args:
        given, top_k, states: what is requested at each position; see `CanaryRows.of`.

    Returns:
        Whether the server works, and a description of its answer, or of the problem.
    """
    try:
        request = _score_canary(url, temperature, given, top_k, states)
        info, rows, answer = asyncio.run(asyncio.wait_for(request, deadline_s))
    except TimeoutError:
        return False, (
            f"{url} did not answer within {deadline_s:g} s: it is overloaded or hangs, and would "
            "delay each step"
        )
    except (EngineError, IsothermError) as error:
        return False, f"{url} cannot score: {error}"
    if fault := first_fault(answer, rows):
        return False, f"{url} answers, but {fault}"
    return True, (
        f"{url} scores {len(answer.at_T_N)} tokens at T={temperature:g}, log q "
        f"{float(answer.at_T_N.mean()):.3g} on average; {info.temperature_scaling}, "
        f"{info.dtype}, vocabulary {info.vocab_size}, context {info.context_length}"
    )


async def _score_canary(
    url: str, temperature: float, given: int, top_k: int, states: bool
) -> tuple[EngineInfo, CanaryRows, CanaryScores]:
    engine = ExternalSglangEngine(url=url, request_deadline_s=_DEADLINE_S)
    try:
        info = await engine.info()
        rows = CanaryRows.of(info, temperature, given=given, top_k=top_k, states=states, number=1)
        return info, rows, rows.answer(await engine.score(rows.requests))
    finally:
        await engine.close()
