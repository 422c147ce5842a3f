# SPDX-License-Identifier: Apache-2.0
"""Addresses of environment servers: ranges, sockets, consecutive ports."""

import pytest

from beast.addresses import consecutive_addresses, expand_addresses


def test_several_servers_have_consecutive_addresses():
    addresses = consecutive_addresses("some.host:50051", 3)
    assert addresses == ["some.host:50051", "some.host:50052", "some.host:50053"]
    assert consecutive_addresses("[::1]:7", 2) == ["[::1]:7", "[::1]:8"]
    assert consecutive_addresses("0.0.0.0:65535", 1) == ["0.0.0.0:65535"]
    assert consecutive_addresses("unix:/a/b", 1) == ["unix:/a/b"]
    assert consecutive_addresses("unix:/a/b", 2) == ["unix:/a/b.0", "unix:/a/b.1"]


def test_server_addresses_may_be_ranges_and_sockets():
    addresses = ["h:1", "h:3", "h:4", "[::1]:5", "unix:/a"]
    assert expand_addresses("h:1, h:3-4,[::1]:5,unix:/a") == addresses
    for text in ("h", "h:2-1", "h:1-70000", ":1", "h:1,"):
        with pytest.raises(ValueError, match="--server_addresses has .*; give host:port"):
            expand_addresses(text)
