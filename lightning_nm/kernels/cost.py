"""Predicted times of one product: a roofline, and the rule that says when packing pays.

Dense and sparse tensor cores differ by one number, the gain ``s`` of the bare sparse product. What it saves must pay
for bringing the N:M operand into the form that the hardware reads. Launches cost nothing here, and sparser patterns
are no faster than 2:4.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_nm.kernels.api import GemmKey

UNFUSED = 7.125
"""Bytes per entry of a 16-bit operand: masked (read 2, write 2), then packed (read 2, write 1.125: values and 2 bits of
position for every second entry)."""

FUSED = 3.125
"""Bytes per entry if one kernel masks and packs: read 2, write 1.125."""

FUSED_PAIR = 2.125
"""Bytes per entry and product if one kernel packs a weight for forward and dgrad: (2 + 2 * 1.125) / 2."""


@dataclass(frozen=True)
class DeviceModel:
    """What the roofline knows of a GPU.

    Args:
        name: As ``torch.cuda.get_device_name`` has it, without the vendor.
        dense_tflops: ``D``, sustained TFLOP/s of large dense 16-bit products.
        bandwidth: ``BW``, sustained GB/s of the memory.
        gain: ``s``, time of the dense product over the time of the bare sparse one.
        source: Where the figures are from.

    Raises:
        ValueError: If a figure is not a positive number.
    """

    name: str
    dense_tflops: float
    bandwidth: float
    gain: float
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[1:4]:
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name}={value!r} of {self.name!r} is not a positive number")


DEVICE_MODELS = {
    model.name: model
    for model in (
        DeviceModel(
            "H200",
            dense_tflops=790,
            bandwidth=4300,
            gain=1.2,
            source="790 of 989 bf16 TFLOP/s at the power limit and 4.3 TB/s, both assumed; "
            "1.20 to 1.22x for 8192^3 on an H100: NVIDIA/CUDALibrarySamples#203",
        ),
    )
}
"""GPUs for which a source is known for every figure; for others make a :class:`DeviceModel`."""


def device_model(name: str) -> DeviceModel:
    """Look up the figures of a GPU.

    Args:
        name: For example ``"H200"`` or ``"NVIDIA H200"``; other variants are other GPUs.

    Raises:
        ValueError: If no figures are known.

    Example::

        >>> device_model("NVIDIA H200").gain
        1.2
    """
    model = DEVICE_MODELS.get(name.removeprefix("NVIDIA "))
    if model is None:
        raise ValueError(
            f"no figures are known for {name!r}, only for {', '.join(sorted(DEVICE_MODELS))}: "
            "measure instead (kernels='auto'), or give its figures as a DeviceModel"
        )
    return model


def dense_ms(key: GemmKey, device: DeviceModel) -> float:
    """Milliseconds of the dense product: ``max(2 r d c / D, 2 (r d + d c + r c) / BW)`` for r rows, depth d, c columns.

    Raises:
        ValueError: If the operands do not have 16 bits.
    """
    return max(_compute_ms(key, device), _traffic_ms(key, device, 2))


def sparse_ms(key: GemmKey, device: DeviceModel) -> float:
    """Milliseconds of the bare sparse product: ``max(2 r d c / (s D), (1.125 r d + 2 d c + 2 r c) / BW)``.

    A dense matrix that must be permuted is read and written once more: ``4 d c / BW``.

    Raises:
        ValueError: If the operands do not have 16 bits.
    """
    gather = _memory_ms(4 * key.depth * key.columns, device) if key.permuted else 0.0
    return gather + max(_compute_ms(key, device) / device.gain, _traffic_ms(key, device, 1.125))


def pack_ms(key: GemmKey, device: DeviceModel, traffic: float = UNFUSED) -> float:
    """Milliseconds of making and packing the N:M operand once: ``b r d / BW``.

    Args:
        key: The product.
        device: The GPU.
        traffic: ``b``, bytes per entry of the operand: :data:`UNFUSED`, :data:`FUSED`, :data:`FUSED_PAIR`.

    Raises:
        ValueError: If the operands do not have 16 bits.
    """
    _check_16_bit(key)
    return _memory_ms(traffic * key.rows * key.depth, device)


def break_even(device: DeviceModel, traffic: float = UNFUSED) -> float:
    """Find how often the entries of a pack must be used before packing pays: ``R = b D / (2 BW (1 - 1/s))``.

    An entry is used once per column of the other operand, and by every product that shares the pack: once per token
    of all micro-batches of a step for weights, `in` times for an output gradient. Holds for products that are large
    enough to be bound by arithmetic.

    Args:
        device: The GPU.
        traffic: ``b``, bytes per entry of the operand.

    Returns:
        The number of uses; infinity if sparse products gain nothing.

    Example::

        >>> round(break_even(device_model("H200")))
        3927
    """
    if device.gain <= 1:
        return float("inf")
    return traffic * device.dense_tflops * 1e12 / (2 * device.bandwidth * 1e9 * (1 - 1 / device.gain))


def speedup(dense_ms: float, sparse_ms: float, pack_ms: float, reuse: int) -> float:
    """Compare a dense product with a sparse one, packing included: ``dense / (sparse + pack / reuse)``.

    Args:
        dense_ms: Milliseconds of the dense product.
        sparse_ms: Milliseconds of the bare sparse product.
        pack_ms: Milliseconds of packing once.
        reuse: Products that use one pack.
    """
    return dense_ms / (sparse_ms + pack_ms / reuse)


def _compute_ms(key: GemmKey, device: DeviceModel) -> float:
    _check_16_bit(key)
    return 2 * key.rows * key.depth * key.columns / (device.dense_tflops * 1e9)


def _traffic_ms(key: GemmKey, device: DeviceModel, entry: float) -> float:
    return _memory_ms(entry * key.rows * key.depth + 2 * (key.depth + key.rows) * key.columns, device)


def _memory_ms(size: float, device: DeviceModel) -> float:
    return size / (device.bandwidth * 1e6)


def _check_16_bit(key: GemmKey) -> None:
    if key.dtype.itemsize != 2:
        raise ValueError(f"the figures of a device are for 16-bit operands, not for {key.dtype}")
