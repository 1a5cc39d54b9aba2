"""How shares become SMs and compute units; the drivers themselves need their GPUs."""

import ctypes

import pytest

from prfaas.colocate.device import cu_masks, green_contexts
from prfaas.errors import ConfigError


@pytest.mark.parametrize(("share", "sms"), [(0.01, 8), (0.2, 32), (0.4, 56), (0.5, 72), (0.97, 128), (0.999, 128)])
def test_decode_gets_whole_groups_of_sms_and_prefill_keeps_some(share: float, sms: int) -> None:
    assert green_contexts.num_decode_sms(share, 132) == sms


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_the_masks_of_both_sides_are_disjoint_and_cover_every_unit(share: float) -> None:
    decode, prefill = (cu_masks.mask_words(side, share, 304) for side in ("decode", "prefill"))
    assert all(a & b == 0 for a, b in zip(decode, prefill, strict=True))
    assert sum((a | b).bit_count() for a, b in zip(decode, prefill, strict=True)) == 304
    assert any(decode) and any(prefill)


def test_a_driver_without_green_contexts_is_said_so() -> None:
    with pytest.raises(ConfigError, match="the driver has no cuDeviceGet"):
        green_contexts.Driver(ctypes.CDLL(None)).stream("decode", 0.5)
