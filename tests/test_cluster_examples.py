"""The manifests for Slurm and Kubernetes: their syntax, and that what they ask Panoply for exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from panoply.cli import _parser
from tests.tiny import ROOT

FOLDER = ROOT / "examples" / "cluster"


def asked(words: list[str]) -> Any:
    return _parser(["train"]).parse_args(["train", *words])


def test_the_slurm_script_is_one_and_its_commands_exist() -> None:
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    train, placed = (
        shlex.split(re.search(rf"^{name}=\((.*?)\)$", text, re.S | re.M).group(1))  # type: ignore[union-attr]
        for name in ("TRAIN", "PLACED")
    )
    chosen = asked([*train, *placed])
    assert (chosen.method, chosen.cluster) == ("grpo", "auto")
    nodes, gpus = (int(re.search(rf"--{name}=(\d+)", text).group(1)) for name in ("nodes", "gpus-per-node"))  # type: ignore[union-attr]
    assert chosen.learners + chosen.samplers == nodes * gpus
    assert asked(["--resume", "RUN", *placed]).resume == "RUN"


def test_the_ray_job_is_one_and_its_commands_exist() -> None:
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (container,), volumes = (pod["template"]["spec"][key] for key in ("containers", "volumes"))
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in volumes
        }
        wanted, most = (container["resources"][key] for key in ("requests", "limits"))
        assert all(wanted[name] == most[name] for name in most)
    subprocess.run(["sh", "-n", "-c", shlex.split(job["spec"]["entrypoint"])[2]], check=True)
    again, begun = (
        shlex.split(words) for words in re.findall(r"panoply train (.*?);", job["spec"]["entrypoint"])
    )
    chosen, resumed = asked(begun), asked(again)
    workers = cluster["workerGroupSpecs"][0]
    gpus = workers["replicas"] * int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert chosen.learners + chosen.samplers == resumed.learners + resumed.samplers == gpus
    assert chosen.run == resumed.resume


@pytest.mark.parametrize("name", ["slurm.sh", "rayjob.yaml", "Dockerfile"])
def test_each_begins_with_how_it_is_used(name: str) -> None:
    said = [line for line in (FOLDER / name).read_text().splitlines()[:5] if line.startswith("#   ")]
    assert any(name in line for line in said)
