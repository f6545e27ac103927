# SPDX-License-Identifier: Apache-2.0
"""The proof of the cluster secret."""

from __future__ import annotations

import random
import struct

import pytest

from moonpool.proto.auth import WINDOW_S, Signer, Verifier
from moonpool.proto.errors import AuthenticationError

METHOD = "/moonpool.v1.Pool/Exists"


def test_each_proof_is_taken_once_in_whatever_order() -> None:
    signer, verifier = Signer(b"secret"), Verifier(b"secret")
    proofs = [signer.sign(METHOD)[1] for _ in range(3000)]
    random.Random(1).shuffle(proofs)
    for proof in proofs:
        verifier.check(METHOD, proof)
    for proof in proofs:
        with pytest.raises(AuthenticationError, match="before"):
            verifier.check(METHOD, proof)


def test_a_proof_that_was_overtaken_by_very_many_is_refused() -> None:
    signer, verifier = Signer(b"secret"), Verifier(b"secret")
    late = signer.sign(METHOD)[1]
    for _ in range(5000):
        proof = signer.sign(METHOD)[1]
    verifier.check(METHOD, proof)
    with pytest.raises(AuthenticationError):
        verifier.check(METHOD, late)


@pytest.mark.parametrize("place", range(73 - 8))
def test_every_byte_counts(place: int) -> None:
    proof = bytearray(Signer(b"secret").sign(METHOD)[1])
    assert len(proof) == 65
    proof[place] ^= 1
    with pytest.raises(AuthenticationError):
        Verifier(b"secret").check(METHOD, bytes(proof))


@pytest.mark.parametrize("proof", [None, "text", b"", bytes(65), b"\1" * 64, b"\1" * 66])
def test_what_is_no_proof_is_refused(proof: bytes | str | None) -> None:
    with pytest.raises(AuthenticationError):
        Verifier(b"secret").check(METHOD, proof)


def test_it_is_of_one_method_one_secret_and_one_time() -> None:
    proof = Signer(b"secret").sign(METHOD)[1]
    with pytest.raises(AuthenticationError, match="another cluster secret"):
        Verifier(b"secret").check("/moonpool.v1.Pool/Remove", proof)
    with pytest.raises(AuthenticationError, match="another cluster secret"):
        Verifier(b"other").check(METHOD, proof)
    (sent,) = struct.unpack_from("<Q", proof, 25)
    for late in (WINDOW_S * 1000 + 1, -WINDOW_S * 1000 - 1):
        with pytest.raises(AuthenticationError, match="clock"):
            Verifier(b"secret", clock=lambda late=late: int(sent + late)).check(METHOD, proof)
    for late in (WINDOW_S * 1000, -WINDOW_S * 1000):
        Verifier(b"secret", clock=lambda late=late: int(sent + late)).check(METHOD, proof)


def test_channels_are_bounded_and_forgotten_when_they_prove_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**18]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    verifier = Verifier(b"secret", channels_max=3)
    proofs = [Signer(b"secret").sign(METHOD)[1] for _ in range(4)]
    for proof in proofs[:3]:
        verifier.check(METHOD, proof)
    with pytest.raises(AuthenticationError, match="too many"):
        verifier.check(METHOD, proofs[3])
    now[0] += round(2.1 * WINDOW_S * 10**9)
    verifier.check(METHOD, Signer(b"secret").sign(METHOD)[1])
    for proof in proofs:
        with pytest.raises(AuthenticationError, match="clock"):
            verifier.check(METHOD, proof)
