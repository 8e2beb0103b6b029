"""Interfaces that gloo cannot use."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchtitan_cp.config import ConfigError
from torchtitan_cp.runtime.gloo import use_one_thread


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_without_an_address_is_named_with_the_others(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_one_thread()
    interfaces = [*socket.if_nameindex(), (99, "eth99")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    monkeypatch.setenv(variable, "eth99")
    with pytest.raises(ConfigError, match=rf"{variable} = 'eth99', and \S+ has no address there") as raised:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
    assert interfaces[0][1] in str(raised.value)
