"""The estimate's model of a device."""

from __future__ import annotations

import pytest

from spindle_cli.errors import InputError
from spindle_cli.profile.machine.devices import device_peak, listed_devices, require_precision
from spindle_cli.profile.machine.roofline import Kernel, kernel_s, kernels_s

H200 = device_peak("h200-141gb")


def product(rows: int, depth: int, columns: int) -> Kernel:
    return Kernel(2.0 * rows * depth * columns, 2.0 * (rows * depth + depth * columns), float(rows * columns))


def test_a_large_product_reaches_what_was_measured() -> None:
    # An 8192-cube bf16 product on an H200 was measured at 769 to 798 TFLOP/s.
    kernel = product(8192, 8192, 8192)
    assert 700e12 < kernel.flops / kernel_s(kernel, H200, "bfloat16") < 800e12


def test_a_copy_takes_the_memory_bandwidth() -> None:
    assert kernel_s(Kernel(0, 4.3e9, 0), H200, "bfloat16") == pytest.approx(1e-3, rel=0.02)


def test_small_shares_do_not_fill_the_device() -> None:
    whole = kernel_s(product(8192, 1024, 1024), H200, "bfloat16")
    eighth = kernel_s(product(1024, 1024, 1024), H200, "bfloat16")
    assert whole / 8 < eighth < whole
    assert eighth > 1.5 * whole / 8


def test_a_deep_product_with_few_outputs_is_split_along_its_depth() -> None:
    shallow, deep = product(256, 1024, 256), product(256, 64 * 1024, 256)
    assert kernel_s(deep, H200, "bfloat16") < 64 * kernel_s(shallow, H200, "bfloat16") / 4


def test_many_small_kernels_take_as_long_as_the_host_needs_to_dispatch_them() -> None:
    tiny = [Kernel(0, 100, 10)] * 50
    assert kernels_s(tiny, H200, "bfloat16") == pytest.approx(50 * H200.host_s_per_kernel)


def test_float32_is_slower_than_bfloat16() -> None:
    kernel = product(4096, 4096, 4096)
    assert kernel_s(kernel, H200, "float32") > 5 * kernel_s(kernel, H200, "bfloat16")


def test_every_listed_device_has_peaks_and_others_are_refused_with_the_list() -> None:
    for name in listed_devices():
        assert device_peak(name).flops_per_s["float32"] > 0
        assert ("bfloat16" in device_peak(name).flops_per_s) == (name[:4] not in ("v100", "p100"))
    with pytest.raises(InputError, match=r"'tpu'.*a800-80gb"):
        device_peak("tpu")


def test_arithmetic_that_a_listed_device_does_not_have_is_refused() -> None:
    require_precision(["h100", "v100", "unlisted"], "float32")
    require_precision(["h100", "unlisted"], "bfloat16")
    with pytest.raises(InputError, match="'v100-32gb' has no bfloat16, only float16 and float32"):
        require_precision(["h100", "v100-32gb"], "bfloat16")


@pytest.mark.parametrize("name", ["p100-pcie-12gb", "tesla-p100-pcie-12gb", "V100-SXM3-32GB"])
def test_a_device_with_a_listed_chip_has_no_arithmetic_that_the_chip_lacks(name: str) -> None:
    """What a cluster file calls one with another memory or board than the listed."""
    require_precision([name], "float16")
    with pytest.raises(InputError, match=f"'{name}' has no bfloat16, only float16 and float32"):
        require_precision([name], "bfloat16")


def test_a_shallow_product_spends_its_time_on_starting_tiles() -> None:
    shallow, deep = product(8192, 512, 8192), product(8192, 8192, 8192)
    rates = [kernel.flops / kernel_s(kernel, H200, "bfloat16") for kernel in (shallow, deep)]
    assert rates[0] == pytest.approx(rates[1] / 2, rel=0.1)
