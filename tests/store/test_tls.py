# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS: what fits works without any secret, and what does not says so at once and why."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from store_testing import key
from store_testing.certificates import Authority, Pair

from moonpool.cli import cli
from moonpool.cluster import local_cluster
from moonpool.errors import ConfigError
from moonpool.master import Master
from moonpool.master.settings import MasterSettings
from moonpool.proto.errors import AuthenticationError, TlsError
from moonpool.store_client import StoreClient
from moonpool.transfer_engine import TransferEngine


@dataclasses.dataclass
class Site:
    """Certificates of a pool, and of somebody who has nothing to do with it."""

    master: Pair
    client: Pair
    elsewhere: Pair
    stranger: Pair
    late: Pair


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("certificates")
    ours, other = Authority(folder, "ours"), Authority(folder, "other")
    return Site(
        master=ours.issue("master"),
        client=ours.issue("client", "DNS:client"),
        elsewhere=ours.issue("elsewhere", "DNS:master.example"),
        stranger=other.issue("stranger"),
        late=ours.issue("late", days=-1),
    )


def options(pair: Pair, **changed: str) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(pair, **changed))


@pytest.fixture(scope="module")
def master(site: Site) -> Iterator[Master]:
    with Master(listen="127.0.0.1:0", http=None, store="memory", **options(site.master)) as its:
        yield its


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as its:
        yield its


def connect(address: str, engine: TransferEngine, **given: Any) -> None:
    with StoreClient(address, engine=engine, startup_timeout=30.0, staging_bytes=1 << 20, **given) as client:
        assert not client.exists("a", [key(0)])[0]


def test_a_pool_over_tls(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        local_cluster(1, "16MiB", master_options=options(site.master), node_options=options(site.client)) as cluster,
        cluster.client(**options(site.client)) as client,
    ):
        client.put("a", [key(0)], [b"x"]).require()
        assert client.get("a", [key(0)])[0] == b"x"
        # Who names no files has those of the master.
        assert cluster.client(staging_bytes="1MiB").get("a", [key(0)])[0] == b"x"
        monkeypatch.setenv("MOONPOOL_STORE_CLIENT_SECRET", cluster.secret)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options(site.client).items()]
        done = CliRunner().invoke(cli, ["ls", "--json", "--master", cluster.master, *flags])
        assert done.exit_code == 0, done.output
        assert [segment["chunks"] for segment in json.loads(done.output)] == [1]
        # With a secret besides, both are asked for.
        with pytest.raises(AuthenticationError):
            connect(cluster.master, client.engine, secret="another", **options(site.client))


def test_certificates_stand_for_the_secret(site: Site, master: Master, engine: TransferEngine) -> None:
    connect(master.address, engine, **options(site.client))
    assert MasterSettings.load({"listen": "0.0.0.0:0", **options(site.master)}, environ={}).secret is None
    with pytest.raises(ConfigError, match="beyond loopback"):
        MasterSettings.load({"listen": "0.0.0.0:0"}, environ={})


def test_a_plain_client_is_told_that_the_master_speaks_tls(master: Master, engine: TransferEngine) -> None:
    with pytest.raises(TlsError, match="the master speaks TLS, and here are no certificates"):
        connect(master.address, engine)


def test_a_client_with_certificates_is_told_that_the_master_speaks_none(site: Site, engine: TransferEngine) -> None:
    with (
        Master(listen="127.0.0.1:0", http=None, store="memory") as plain,
        pytest.raises(TlsError, match="the master speaks no TLS"),
    ):
        connect(plain.address, engine, **options(site.client))


def test_a_client_of_another_authority_is_told_so(site: Site, master: Master, engine: TransferEngine) -> None:
    with pytest.raises(TlsError, match=r"certificate of the master is not accepted.*tls_ca of the authority"):
        connect(master.address, engine, **options(site.stranger))
    with pytest.raises(TlsError, match="the master does not accept the certificate of this side"):
        connect(master.address, engine, **options(site.stranger, tls_ca=site.client.tls_ca))


def test_a_name_that_does_not_fit_can_be_set(site: Site, engine: TransferEngine) -> None:
    with Master(listen="127.0.0.1:0", http=None, store="memory", **options(site.elsewhere)) as master:
        with pytest.raises(TlsError, match=r"not accepted for '127\.0\.0\.1'.*tls_name"):
            connect(master.address, engine, **options(site.client))
        connect(master.address, engine, tls_name="master.example", **options(site.client))


@pytest.mark.parametrize("side", ["master", "client"])
def test_files_that_cannot_be_used_are_refused_at_the_start(
    site: Site, side: str, tmp_path: Path, engine: TransferEngine
) -> None:
    garbage, locked = tmp_path / "garbage.pem", tmp_path / "locked.key"
    garbage.write_text("nothing in here")
    subprocess.run(
        ["openssl", "ec", "-in", site.master.tls_key, "-aes128", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )

    def begin(**given: Any) -> None:
        if side == "master":
            Master(listen="127.0.0.1:0", http=None, store="memory", **given)
        else:
            connect("127.0.0.1:1", engine, **given)

    missing = str(tmp_path / "missing.pem")
    for changed, said in (
        ({"tls_cert": missing}, "tls_cert: .*missing.pem cannot be read"),
        ({"tls_key": missing}, "tls_key: .*missing.pem cannot be read"),
        ({"tls_ca": missing}, "tls_ca: .*missing.pem cannot be read"),
        ({"tls_cert": str(garbage)}, "tls_cert or tls_key: .* cannot be used"),
        ({"tls_key": str(garbage)}, "tls_cert or tls_key: .* cannot be used"),
        ({"tls_ca": str(garbage)}, "tls_ca: .* cannot be used"),
        ({"tls_ca": site.master.tls_cert}, "has no certificate of an authority"),
        ({"tls_key": site.client.tls_key}, "is not the key of"),
        ({"tls_key": str(locked)}, "passphrase"),
        ({"tls_cert": site.late.tls_cert, "tls_key": site.late.tls_key}, "certificate has expired"),
        ({"tls_ca": ""}, "tls_ca missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            begin(**options(site.master, **changed))
    with pytest.raises(ConfigError, match="tls_name without"):
        connect("127.0.0.1:1", engine, tls_name="name")
    with pytest.raises(ConfigError, match="tls_name is empty"):
        connect("127.0.0.1:1", engine, tls_name="", **options(site.client))
