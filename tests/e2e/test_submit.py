"""The real command as a job of a real cluster: submitted, stopped, resumed, refused."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from actors.sglang.installed import sglang_installed
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY, metrics, opd_arguments, trained_groups
from tests.e2e.ray_head import Head, ray_head
from tests.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head(cpus=8) as head:
        yield head


def submit(head: Head, *arguments: str, wait: bool = True) -> subprocess.Popen[str]:
    """`ray job submit` of the working directory, as a user types it."""
    flags = [] if wait else ["--no-wait"]
    return subprocess.Popen(
        [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address={head.url}",
            "--working-dir=.", "--runtime-env=runtime-env.yaml", *flags, "--",
            "python", "-m", "cluster.train", "recipe=opd", *arguments,
        ],
        cwd=REPOSITORY,
        env=dict(head.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def output_of(job: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = job.communicate(timeout=DEADLINE_S)
    finally:
        job.kill()
    return job.returncode, output


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def test_two_concurrent_jobs_stream_their_steps_and_are_submitted_once(
    head: Head, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """One has engines in its actors, and one has its own servers where SGLang is installed."""
    outs = [tmp_path / name for name in ("one", "two")]
    engines = ["embedded", "sglang" if sglang_installed() else "embedded"]
    jobs = [
        submit(head, *opd_arguments(tiny_pair, out, steps=3, engine=engine))
        for out, engine in zip(outs, engines, strict=True)
    ]
    for job, out in zip(jobs, outs, strict=True):
        code, output = output_of(job)
        assert code == 0, output
        assert "succeeded" in output and "finished 3 steps" in output
        assert "step 3" in output or "3/3" in output, "the steps did not stream"
        assert trained_groups(out) == list(range(12))
        assert summary(out)["status"] == "finished" and (out / "final/config.json").is_file()
        uploaded = [line for line in output.splitlines() if "Uploading package" in line]
        assert uploaded or "already exists" in output, output

    code, output = output_of(submit(head, *opd_arguments(tiny_pair, outs[0], steps=3)))
    assert code == 0 and "nothing to do" in output, output


def test_a_stopped_job_has_a_checkpoint_and_resumes(
    head: Head, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    client = JobSubmissionClient(head.url)
    before = {job.submission_id for job in client.list_jobs()}
    arguments = opd_arguments(tiny_pair, out, steps=5000, checkpoint_every=5000)
    code, output = output_of(submit(head, *arguments, wait=False))
    assert code == 0, output
    (job,) = {job.submission_id for job in client.list_jobs()} - before
    assert job is not None
    until(lambda: len(metrics(out)) >= 2)
    client.stop_job(job)
    until(lambda: client.get_job_status(job).is_terminal())
    assert client.get_job_status(job) == JobStatus.STOPPED, client.get_job_logs(job)
    done = len(metrics(out))
    assert summary(out)["status"] == "interrupted", client.get_job_logs(job)
    assert (out / f"checkpoints/step-{done:06d}/manifest.json").is_file()

    code, output = output_of(submit(head, *arguments, f"steps={done + 1}"))
    assert code == 0 and "resuming from" in output, output
    assert trained_groups(out) == list(range(4 * (done + 1)))


def test_bad_input_fails_the_job_with_its_own_code(
    head: Head, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    client = JobSubmissionClient(head.url)
    before = {job.submission_id for job in client.list_jobs()}
    missing = tmp_path / "missing.jsonl"
    code, output = output_of(
        submit(head, *opd_arguments(tiny_pair, tmp_path / "run", prompts=missing))
    )
    assert code == 1, "Ray's own command says 1 of every failure"
    assert str(missing) in output
    (job,) = {job.submission_id for job in client.list_jobs()} - before
    assert job is not None
    information = client.get_job_info(job)
    assert information.status == JobStatus.FAILED and information.driver_exit_code == 2
