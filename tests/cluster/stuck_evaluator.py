"""An evaluator's actor that misbehaves. It imports little, because it is restarted often."""

import asyncio
import ctypes
import os
from pathlib import Path

from actors.rollout.user_code_file import UserCodeFile


class StuckEvaluator:
    """An evaluator of three problems that misbehaves in the code of problem 1, unless spared."""

    def __init__(self, inside: str) -> None:
        self._inside = UserCodeFile(inside, 3)

    async def evaluate(self, way: str, spared: str) -> str:
        async with self._inside.entered(0):
            pass
        async with self._inside.entered(1), self._inside.entered(1):
            if not Path(spared).exists():
                await self._misbehave(way)
        return "well"

    async def die_in_no_code(self) -> None:
        os._exit(3)

    async def _misbehave(self, way: str) -> None:
        match way:
            case "dies":
                os._exit(3)
            case "waits":
                await asyncio.Event().wait()
            case "holds the interpreter":
                ctypes.PyDLL(None).sleep(3600)
