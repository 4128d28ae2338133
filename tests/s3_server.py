"""An S3 server in this process, for tests of what goes to and comes from a bucket."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, folder: Path, **credentials: str) -> Iterator[str]:
    """The address of an empty bucket. The environment names its server, and no credentials but these; `folder` is for no file."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import boto3
    import s3fs

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    nowhere = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(folder / "none"))
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in (settings | nowhere | credentials).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")):
        pass  # all servers of a process have the same buckets
    client = boto3.client("s3", aws_access_key_id="x", aws_secret_access_key="y")
    client.create_bucket(Bucket="banks")
    client.close()
    yield "s3://banks"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
