"""Shares of a GPU as numbers of SMs. The drivers themselves need a GPU."""

import ctypes

import pytest

from prfaas.colocate.device import streams
from prfaas.errors import ConfigError


@pytest.mark.parametrize(("share", "sms"), [(0.01, 8), (0.2, 32), (0.4, 56), (0.5, 72), (0.97, 128), (0.999, 128)])
def test_decode_gets_whole_groups_of_sms_and_prefill_keeps_some(share: float, sms: int) -> None:
    assert streams.num_decode_sms(share, 132) == sms


def test_a_driver_without_green_contexts_is_said_so() -> None:
    with pytest.raises(ConfigError, match="the driver has no cuDeviceGet"):
        streams.Driver(ctypes.CDLL(None)).stream("decode", 0.5)
