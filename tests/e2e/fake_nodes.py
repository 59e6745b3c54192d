"""The worker nodes of `tests.e2e.ray_head`. Ray's autoscaler loads this file."""

import json
from collections.abc import Mapping
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import LABELS_ENVIRONMENT_VARIABLE, RESOURCES_ENVIRONMENT_VARIABLE
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)


class LoopbackNodes(FakeMultiNodeProvider):
    """Ray's fake provider, but with nodes that listen on the head's loopback address.

    Ray's own gives its nodes the machine's address. `provider:` takes "node_ip_address" as well.
    """

    def _create_node_with_resources_and_labels(
        self,
        node_config: Mapping[str, Any],
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, Any],
        labels: dict[str, str],
    ) -> None:
        wanted = dict(resources)
        with self.lock:
            node_id = self._next_hex_node_id()
            node_type = tags[TAG_RAY_USER_NODE_TYPE]
            parameters = RayParams(
                node_ip_address=self.provider_config["node_ip_address"],
                gcs_address=self._gcs_address, redis_address=self._gcs_address, min_worker_port=0,
                max_worker_port=0, dashboard_agent_listen_port=0, num_cpus=wanted.pop("CPU", 0),
                num_gpus=wanted.pop("GPU", 0),
                object_store_memory=wanted.pop("object_store_memory", None), resources=wanted,
                labels=labels,
                env_vars={
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id, "RAY_CLOUD_INSTANCE_ID": node_id,
                    "RAY_NODE_TYPE_NAME": node_type,
                    RESOURCES_ENVIRONMENT_VARIABLE: json.dumps(wanted),
                    LABELS_ENVIRONMENT_VARIABLE: json.dumps(labels),
                },
            )  # fmt: skip
            node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
            nodes: dict[str, dict[str, Any]] = self._nodes
            nodes[node_id] = {
                "tags": {
                    TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: node_type,
                    TAG_RAY_NODE_NAME: node_id, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE, **tags,
                },
                "node": node,
            }  # fmt: skip
