"""A class in place of an engine or a learner worker that imports little."""

import os

import ray


class Seer:
    """Reports its node and its GPUs."""

    def __init__(self, server: object = None) -> None:
        self.server = server

    async def where(self) -> tuple[str, str]:
        node = ray.get_runtime_context().get_node_id()
        return node, os.environ["CUDA_VISIBLE_DEVICES"]
