# SPDX-License-Identifier: Apache-2.0
"""SkyPilot reads examples/skypilot.yaml. No cloud is used."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest
from harness import ROOT, WAIT_S, clean_environment

# SkyPilot needs an environment of its own, since it cannot be installed together with the training libraries.
PYTHON = pathlib.Path(os.environ.get("ROPETEAM_SKY_VENV", ROOT / "build" / "sky-venv")) / "bin" / "python"

# Runs in a process with a temporary HOME, since SkyPilot writes below the home directory.
ASK = """if True:
    import json, sys
    import sky, yaml

    with open(sys.argv[1]) as file:
        config = {**yaml.safe_load(file), **json.loads(sys.argv[2])}
    task = sky.Task.from_yaml_config(config, secrets_overrides=[("ROPETEAM_JOB_KEY", "the key")])
    (resources,) = task.resources
    print(json.dumps({
        "nodes": task.num_nodes,
        "cloud": str(resources.cloud),
        "accelerators": resources.accelerators,
        "spot": resources.use_spot,
        "network": resources.network_tier.value,
        "image": list(resources.image_id.values()),
        "secrets": sorted(task.secrets),
        "envs": task.envs,
    }))
"""


def read_by_sky(tmp_path, **changed) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        pytest.skip("skypilot is not installed (scripts/test --frameworks makes build/sky-venv)")
    return subprocess.run(
        [str(PYTHON), "-c", ASK, str(ROOT / "examples" / "skypilot.yaml"), json.dumps(changed)],
        env=clean_environment(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1"),
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def test_skypilot_takes_the_task_as_it_is_meant(tmp_path):
    done = read_by_sky(tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "nodes": 4,
        "cloud": "AWS",
        "accelerators": {"H100": 8},
        "spot": True,
        "network": "best",
        "image": ["docker:registry.example.com/ropeteam:latest"],
        "secrets": ["ROPETEAM_JOB_KEY"],
        "envs": {"BUCKET": "my-bucket"},
    }


def test_skypilot_would_refuse_a_field_that_it_does_not_know(tmp_path):
    done = read_by_sky(tmp_path, resources={"infra": "aws", "spot": True})
    assert done.returncode != 0 and "spot" in done.stderr
