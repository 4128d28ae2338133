"""bfloat16 and fp8 as bits, against torch and against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arrowbank.bank.floats import E4M3, E5M2, all_finite, bfloat16_bits, float32_of, fp8_decode, fp8_encode, nonfinite

AWKWARD = [
    0.0,
    -0.0,
    1e-30,
    98304.0,
    3e38,
    3.4e38,
    1e39,
    -1e39,
    1e-45,
    float("inf"),
    float("-inf"),
    float("nan"),
    1 + 2**-8,
    1 + 3 * 2**-8,
]


def torch_bits(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bits, but for which of its many NaNs torch takes on which processor."""
    nan = (ours & 0x7FFF) > 0x7F80
    assert np.array_equal(nan, (theirs & 0x7FFF) > 0x7F80)
    assert np.array_equal(ours[~nan], theirs[~nan])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrow_floats_are_rounded_as_torch_rounds_them(dtype: type) -> None:
    count = 1 << 16
    values = (
        np.arange(count, dtype=np.uint16).view(np.float16)
        if dtype is np.float16
        else np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    )
    with np.errstate(over="ignore"):
        values = np.concatenate([values, np.array(AWKWARD, np.float32).astype(dtype)])
    assert_same(bfloat16_bits(values), torch_bits(torch.from_numpy(values)))


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_float64_is_rounded_once_to_nearest_even(value: float) -> None:
    (found,) = bfloat16_bits(np.array([value]))
    magnitude = int(found) & 0x7FFF
    if magnitude == 0x7F80:
        assert abs(value) >= 2.0**127 * (2 - 2**-8)  # past the middle between the largest and what would come next
        return
    neighbours = np.array([max(magnitude - 1, 0), magnitude, min(magnitude + 1, 0x7F7F)], np.uint16)
    below, here, above = (Fraction(float(near)) for near in float32_of(neighbours))
    exact = abs(Fraction(value))
    assert all(abs(exact - here) <= abs(exact - other) for other in (below, above))
    if abs(exact - here) in (abs(exact - below), abs(exact - above)) and exact != here:
        assert magnitude % 2 == 0
    assert (found >> 15) == (1 if np.signbit(value) else 0)


def test_float64_is_not_rounded_twice() -> None:
    value = 1 + 2**-8 + 2**-40  # as float32 the last term is gone, and what is left is a tie
    assert bfloat16_bits(np.array([value]))[0] == 0x3F81
    assert bfloat16_bits(np.array([1 + 2**-8]))[0] == 0x3F80


def test_awkward_float64_values() -> None:
    assert_same(bfloat16_bits(np.array(AWKWARD)), torch_bits(torch.tensor(AWKWARD, dtype=torch.float64)))


@pytest.mark.parametrize(("table", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_8_bit_floats_are_torchs(table: np.ndarray, dtype: torch.dtype) -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ours = torch.from_numpy(float32_of(table))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 17) - 1, 1 << 17, (1 << 18) + 3])
@pytest.mark.parametrize("aligned", [True, False])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(size: int, aligned: bool) -> None:
    room = np.zeros(2 * size + 1, np.uint8)
    values = room[(0 if aligned else 1) :][: 2 * size].view(np.uint16)
    values[...] = 0x7F7F  # the largest finite value
    assert all_finite(values)
    for at in {0, size // 2, size - 1} if size else ():
        for bad in (0x7F80, 0xFF80, 0x7FC0):
            kept, values[at] = values[at], bad
            assert not all_finite(values)
            assert np.flatnonzero(nonfinite(values)).tolist() == [at]
            values[at] = kept


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]), st.floats(1e-20, 1e20))
def test_fp8_keeps_the_largest_value_and_is_near_everywhere(seed: int, groups: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((4, groups * 16)) * scale).astype(np.float32)
    values[0] = 0
    bits = bfloat16_bits(values)
    codes, scales = fp8_encode(bits, groups)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (np.uint8, bits.shape, np.float32, (4, groups))
    back, true = float32_of(fp8_decode(codes, scales)), float32_of(bits)
    assert np.array_equal(back[0], true[0])
    largest = np.abs(true).reshape(4, groups, 16).max(axis=2).repeat(16, axis=1)
    assert (np.abs(back - true) <= np.abs(true) * (2**-4 + 2**-7) + largest * 2.0**-17).all()
