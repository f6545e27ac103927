# SPDX-License-Identifier: Apache-2.0
"""Addresses as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool import AddressError
from moonpool.address import Address, parse_address, parse_addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7700", "127.0.0.1", 7700),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("[::1]:7700", "::1", 7700),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("decode-0:7700", "decode-0", 7700),
        ("kv_node.rack-1.example.org:1", "kv_node.rack-1.example.org", 1),
        ("example.org.:1", "example.org.", 1),
        ("3com:80", "3com", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("tcp://10.0.0.7:7700", "scheme", "'10.0.0.7:7700'"),
        ("7700", "no host", "'127.0.0.1:7700'"),
        (":7700", "no host", "'127.0.0.1:7700'"),
        ("decode-0", "no port", "'decode-0:7700'"),
        ("", "no port", "'host:7700'"),
        ("::1:7700", "brackets", "'[::1]:7700'"),
        ("a:b:c", "brackets", "'[::1]:7700'"),
        ("[::1:7700", "closing", "'[::1]:7700'"),
        ("[decode-0]:7700", "not an IPv6", "'[::1]:7700'"),
        ("[::1%]:7700", "not an IPv6", "'[::1]:7700'"),
        ("[::1]", "no port", "'[::1]:7700'"),
        ("decode-0:", "port ''", "7700"),
        ("decode-0:http", "port 'http'", "7700"),
        ("decode-0:65536", "port '65536'", "7700"),
        ("decode-0:-1", "port '-1'", "7700"),
        ("decode-0:٧٧", "port", "7700"),
        ("decode 0:7700", "host name", "decode-0"),
        ("-x:7700", "host name", "decode-0"),
        ("10.0.1:7700", "IPv4", "decode-0"),
        ("256.0.0.1:7700", "IPv4", "decode-0"),
        ("x" * 64 + ":1", "host name", "decode-0"),
    ],
)
def test_what_is_no_address_says_why_and_what_would_be(text: str, problem: str, hint: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert problem in caught.value.message
    assert hint in caught.value.hint


def test_hints_about_masters_show_the_port_of_a_master() -> None:
    with pytest.raises(AddressError) as caught:
        parse_addresses("10.0.0.1:7600,master-1")
    assert caught.value.hint == "'master-1:7600'"


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_typed_error(text: str) -> None:
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert parse_address(str(address)) == address
