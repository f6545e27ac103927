# SPDX-License-Identifier: Apache-2.0
"""Two processes that cannot share memory use another path and say why, or refuse when shm is required."""

from __future__ import annotations

import os
from typing import Any

import pytest
from engine_testing.fixtures import OpenEngine
from engine_testing.places import NOBODY, why_no_unshare
from engine_testing.processes import Target

from moonpool.transfer_engine import TransportUnavailableError

NBYTES = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

#: How the target is started, and what is to be said about it.
PLACES: list[Any] = [
    pytest.param(
        {"place": {"uid": NOBODY}}, f"another user ({NOBODY}, this process as 0)", marks=needs_root, id="user"
    ),
]
for _name, _options in {
    "PID namespace": ["--pid", "--fork", "--kill-child"],
    "user namespace": ["--user", "--map-root-user"],
}.items():
    _why_not = why_no_unshare(*_options)
    PLACES.append(
        pytest.param(
            {"before": ["unshare", *_options]},
            f"another container ({_name})",
            marks=pytest.mark.skipif(bool(_why_not), reason=_why_not),
            id=_name,
        )
    )
_why_not = why_no_unshare("--net")
PLACES.append(
    pytest.param(
        {"place": {"network": True}},
        "another container (network namespace)",
        marks=pytest.mark.skipif(bool(_why_not), reason=_why_not),
        id="network namespace",
    )
)


@pytest.mark.parametrize(("how", "reason"), PLACES)
def test_a_process_apart_is_reached_over_tcp_and_the_reason_is_told(
    open_engine: OpenEngine, how: dict[str, Any], reason: str
) -> None:
    client = open_engine(transports="shm,tcp", listen=None)
    with Target({"kv": NBYTES}, **how) as target:
        peer = client.connect(target.address)
        local = client.allocate(NBYTES)
        client.read(peer, local, peer.regions["kv"]).wait()
        assert peer.path == "tcp"
        assert peer.fallback == f"shm: the peer {'runs as' if 'user (' in reason else 'is in'} {reason}"
        assert client.stats()["paths"]["tcp"]["read_bytes"] == NBYTES
        assert client.stats()["regions_mapped"] == 0
        peer.close()


@pytest.mark.parametrize(("how", "reason"), PLACES)
def test_a_process_apart_is_refused_when_shm_is_required(
    open_engine: OpenEngine, how: dict[str, Any], reason: str
) -> None:
    client = open_engine(require="shm", listen=None)
    with Target({"kv": NBYTES}, **how) as target:
        with pytest.raises(TransportUnavailableError) as caught:
            client.connect(target.address)
        assert reason in str(caught.value)
        assert not caught.value.retryable


def two_of_nobody(target_options: dict[str, Any], client_options: dict[str, Any]) -> tuple[Target, Target]:
    return (
        Target({"mapped": NBYTES}, place={"uid": NOBODY}, **target_options),
        Target(place={"uid": NOBODY, "dumpable": False}, listen=None, **client_options),
    )


@needs_root
def test_a_client_whose_memory_cannot_be_reached_still_maps_the_peers(open_engine: OpenEngine) -> None:
    """Nobody may look into it, as with kernel.yama.ptrace_scope; it may look into what it was given."""
    owner, client = two_of_nobody({}, {})
    with owner, client:
        owner.add("copied", NBYTES, "copied")
        assert client.ask("connect", address=owner.address)["path"] == "shm"
        assert client.ask("read", name="mapped") == {"intact": True, "paths": ["shm"]}
        # It looks into its peer, which lets it; the peer cannot look into it for what it writes.
        assert client.ask("read", name="copied") == {"intact": True, "paths": ["shm"]}
        client.ask("begin_write", name="copied", block=NBYTES)
        assert client.ask("end_write")["state"] == "COMPLETED"
        written = {path: counters["written_bytes"] for path, counters in client.ask("stats")["paths"].items()}
        assert written["tcp"] == NBYTES
        assert written["shm"] == 0
        assert client.ask("read", name="mapped") == {"intact": True, "paths": ["shm"]}
        client.ask("disconnect")


@needs_root
def test_registered_memory_of_an_owner_that_nobody_may_look_into_is_copied_by_it(open_engine: OpenEngine) -> None:
    owner = Target({"mapped": NBYTES}, place={"uid": NOBODY, "dumpable": False})
    client = Target(place={"uid": NOBODY}, listen=None, require="shm")
    with owner, client:
        owner.add("copied", NBYTES, "copied")
        connected = client.ask("connect", address=owner.address)
        assert connected["path"] == "shm"
        assert "copied by the peer: this process may not read it there" in connected["fallback"]
        for name in ("mapped", "copied"):
            assert client.ask("read", name=name) == {"intact": True, "paths": ["shm"]}
        assert owner.ask("stats")["serving"]["read_bytes"] == NBYTES
        client.ask("disconnect")


@needs_root
def test_memory_that_cannot_be_reached_is_an_error_when_shm_is_required(open_engine: OpenEngine) -> None:
    owner, client = two_of_nobody({}, {"require": "shm"})
    with owner, client:
        owner.add("copied", NBYTES, "copied")
        client.ask("connect", address=owner.address)
        for name in ("mapped", "copied"):
            assert client.ask("read", name=name) == {"intact": True, "paths": ["shm"]}
        client.ask("begin_write", name="copied", block=NBYTES)
        assert "TransportUnavailableError" in client.ask("end_write")["error"]
        client.ask("disconnect")


@needs_root
def test_two_processes_of_one_other_user_share_memory(open_engine: OpenEngine) -> None:
    """Otherwise the tests above would prove nothing."""
    with (
        Target({"mapped": NBYTES}, place={"uid": NOBODY}) as owner,
        Target(place={"uid": NOBODY}, listen=None) as client,
    ):
        owner.add("copied", NBYTES, "copied")
        connected = client.ask("connect", address=owner.address)
        assert connected == {"path": "shm", "fallback": "local: the peer is another process"}
        for name in ("mapped", "copied"):
            assert client.ask("read", name=name) == {"intact": True, "paths": ["shm"]}
        assert owner.ask("stats")["serving"]["read_bytes"] == 0
        client.ask("disconnect")
