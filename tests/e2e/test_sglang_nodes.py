"""A policy server over two nodes of a cluster: pushes reach both ranks, and they restart together.

The nodes are raylets on this machine; SGLang's ranks know one another by address.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from actors.sglang.installed import sglang_installed
from cluster.inspect.audit import audit
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, events, metrics, opd_arguments, trained_groups
from tests.waiting import DEADLINE_S

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed"),
]

# Kills a process of the second node once two steps are done, says where the server's parts are, and
# ends the run three steps after all of the server is back.
_RUN = """
import json, os, signal, sys, threading, traceback
from pathlib import Path
import psutil, ray
from ray.cluster_utils import Cluster
from cluster.train import main
from tests.e2e.harness import events, metrics
from tests.waiting import until

out, arguments = Path(sys.argv[1]), sys.argv[2:]
cluster = Cluster()
cluster.add_node(num_cpus=2, include_dashboard=False)
for _ in range(2):
    cluster.add_node(num_cpus=1)
cluster.connect()
seen = {}

def lose_a_node_s_processes():
    until(lambda: len(metrics(out)) >= 2)
    table = ray.util.placement_group_table().values()
    [group] = [group for group in table if group["name"].endswith("/policy-0")]
    seen["strategy"] = group["strategy"]
    seen["nodes"] = list(group["bundles_to_node_id"].values())
    [named] = [
        each
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].endswith("policy-0-node-1")
    ]
    follower = ray.get_actor(**named)
    pid = ray.get(follower.__ray_call__.remote(lambda _: os.getpid()))
    below = psutil.Process(pid).children(recursive=True)
    [launcher] = [p for p in below if "actors.sglang.launch" in p.cmdline()]
    launcher.send_signal(signal.SIGKILL)
    until(lambda: events(out, "restart"))
    seen["before"] = len(metrics(out))
    until(lambda: len(metrics(out)) >= seen["before"] + 3)

def then_end_the_run():
    try:
        lose_a_node_s_processes()
    except Exception:
        traceback.print_exc()
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=then_end_the_run, daemon=True).start()
code = main(["recipe=opd", *arguments])
print(json.dumps(seen | {"code": code}))
ray.shutdown()
cluster.shutdown()
"""


def test_a_run_with_a_policy_over_two_nodes_survives_the_loss_of_one(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, engine="sglang", steps=5000, max_staleness=0, eval_size=0, verify_every=1,
        policy_server_flags="--tp-size 2 --nnodes 2",
    )  # fmt: skip
    # Where Ray would record this cluster for later `ray.init` calls on this machine.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        ended = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(out), *arguments], cwd=REPOSITORY,
            env={**os.environ, "RAY_TMPDIR": directory}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = ended.communicate(timeout=DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ended.pid, signal.SIGKILL)
    assert ended.returncode == 0, output
    seen = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    assert seen["code"] == 128 + signal.SIGINT, output
    assert seen["strategy"] == "STRICT_SPREAD" and len(set(seen["nodes"])) == 2
    [death], [restart] = events(out, "death"), events(out, "restart")
    assert death["who"] == restart["who"] == "policy engine 0", output
    assert death["why"].startswith("on another of its nodes: the SGLang server"), death
    steps = metrics(out)
    assert len(steps) >= seen["before"] + 3
    assert trained_groups(out) == list(range(len(steps) * 4))
    assert all(step["train/logprob_gap"] < 1e-3 for step in steps), "a rank has other weights"
    # Of both ranks. (A head of keys that both hold whole is compared between engines alone.)
    proven = [step["push/proven"] for step in steps if "push/proven" in step]
    assert len(proven) >= len(steps) - 3 and min(proven) > 0.5
    assert audit(out / "ledger.jsonl").problems == []
    logs = {path.name for path in (out / "logs").glob("policy*.log")}
    assert logs == {"policy-0.log", "policy-0-node-1.log"}
