"""How a node knows itself."""

import socket

from torchtitan_cp.runtime import nodes


def test_a_node_knows_itself_by_name_and_by_any_address_of_its_interfaces() -> None:
    assert [nodes.is_own(host) for host in (socket.gethostname(), "127.0.0.1", "127.9.8.7", "192.0.2.1")] == [
        True,
        True,
        True,
        False,
    ]
