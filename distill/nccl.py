"""NCCL settings on which learner and engines must agree, or a group of both hangs or fails.

Unless the environment sets them, SGLang turns both off for its servers, while NCCL turns them on.
Each process reads them once, when it opens its first communicator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_AGREED = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def nccl_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """NCCL settings for a process with this environment and for the server that it starts."""
    return {name: environment.get(name, value) for name, value in _AGREED.items()}
