# SPDX-License-Identifier: Apache-2.0
"""Runs the conformance suite of the sinks against moto's S3, a second implementation beside the tests' strict
server."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ROPETEAM_BUILD", ROOT / "build" / "release"))
# moto answers 500 for a part of an aborted upload, which the sink retries until the deadline.
NOT_BY_MOTO = ["*.UnfinishedUploadsAreAbortedByAge/*", "*.AnAbortedUploadLeavesNothing/*"]
SUITE = BUILD / "tests" / "storage" / "s3" / "s3_conformance_test"


@pytest.mark.skipif(not SUITE.exists(), reason=f"{SUITE} is not built")
def test_the_suite_of_sinks_passes_against_moto(monkeypatch):
    pytest.importorskip("flask_cors", reason="moto's server needs flask and flask-cors")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    moto = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        boto3.client("s3", region_name="us-east-1", endpoint_url=endpoint).create_bucket(Bucket="bucket")
        done = subprocess.run(
            [SUITE, f"--gtest_filter=*/moto:-{':'.join(NOT_BY_MOTO)}"],
            env=os.environ | {"ROPETEAM_MOTO": endpoint},
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        moto.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"PASSED +\] (\d+) tests", done.stdout)
    assert passed and int(passed[1]) > 20, done.stdout
