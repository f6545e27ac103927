# SPDX-License-Identifier: Apache-2.0
"""The reply to a call is lost on the way. The call is made again, and it is as if it had been made once."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from store_testing import keys

from moonpool.cluster import local_cluster
from moonpool.store_client import StoreClient


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the connection broke"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def lose_first_reply(client: StoreClient, method: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    stub = client._core.link.stub
    real, replies = getattr(stub, method), []

    def call(*args: Any, **options: Any) -> Any:
        replies.append(real(*args, **options))
        if len(replies) == 1:
            raise Lost
        return replies[-1]

    monkeypatch.setattr(stub, method, call)
    return replies


@pytest.mark.parametrize("method", ["PutStart", "PutCommit", "Pin", "Unpin", "Remove"])
def test_a_call_whose_reply_is_lost_is_made_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_cluster(nodes=1, dram="16MiB") as cluster, cluster.client() as client:
        replies = lose_first_reply(client, method, monkeypatch)
        hashes = keys(4)
        client.put("a", hashes, [b"x" * 1000] * 4, timeout=5).require()
        pin = client.pin("a", hashes)
        assert len(pin) == 4
        pin.release()
        assert client.master_stats()["pins"] == 0
        assert client.remove("a", hashes).ok
        assert len(replies) == 2
        assert client.master_stats()["index"]["writing"] == 0
