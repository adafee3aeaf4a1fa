"""ClusterSpec: the devices and the links between them. The catalogue is data: `catalogue/*.toml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, model_validator

from meshwright.core.profile import Profile
from meshwright.core.values import MAX_SIZE, Value

MAX_DEVICES = 1_000_000
"""Of a cluster: all ways to split it are enumerated."""

DRIVER_SHARE = 0.0106
"""Of a device's memory, that no job gets: of an A100's 80 GiB, CUDA offers 79.15 (PyTorch's own messages)."""

Tier = Literal["none", "cpu", "disk"]
"""Where something offloaded lies: nowhere, in the memory of the host, on a disk."""


class Device(Value):
    """One accelerator, or one CPU rank. Peak figures are dense, per device."""

    name: str
    memory_bytes: int = Field(gt=0)
    memory_bandwidth_bytes_per_s: float = Field(gt=0)
    peak_flops_per_s: dict[str, PositiveFloat]
    """Keyed by dtype: fp64, fp32, bf16, fp16, fp8."""
    source: str = ""
    """Where the figures come from."""
    cores: float | None = Field(default=None, gt=0)
    """Processor cores of a CPU rank; None: enough. Ranks with less than one take turns, and its figures are what a rank
    reaches while all of them work: while others wait, it is faster."""
    profile: Profile | None = None
    """What its kernels reach of them, measured; None where nobody has."""

    @property
    def offered_memory_bytes(self) -> int:
        """What the driver leaves of its memory."""
        return int((1 - DRIVER_SHARE) * self.memory_bytes)


class Link(Value):
    """What one rank can send, per direction."""

    name: str
    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    """Of one message."""
    collective_share: float = Field(default=1.0, gt=0, le=1)
    """Of the bandwidth, that collectives reach; a message between two ranks has all of it."""


class ClusterSpec(Value):
    """`num_nodes` nodes of `devices_per_node` equal devices."""

    name: str
    num_nodes: int = Field(gt=0, le=MAX_SIZE)
    devices_per_node: int = Field(gt=0, le=MAX_SIZE)
    device: Device
    intra_link: Link
    """Between devices of a node."""
    inter_link: Link
    """Between nodes, per device."""
    backend: Literal["gloo", "nccl"] = "nccl"
    """`gloo` on CPU, `nccl` on GPU."""
    usable_memory_fraction: float = Field(default=0.92, gt=0, le=1)
    """Share of a device's memory that a rank may fill; the rest is the backend's."""
    compute_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of peak FLOP/s that matrix products reach."""
    host_memory_bytes: int | None = Field(default=None, gt=0)
    """Of a node, that its ranks may offload to together; None: not stated. CPU ranks then share their own memory."""
    host_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    """What one device reads from it or writes to it; None: not stated. For CPU ranks then that of their memory."""
    disk_bytes: int | None = Field(default=None, gt=0)
    """Of a node's disk, likewise."""
    disk_read_bytes_per_s: float | None = Field(default=None, gt=0)
    """All ranks of a node together; None: not stated."""
    disk_write_bytes_per_s: float | None = Field(default=None, gt=0)
    """Likewise."""

    @model_validator(mode="after")
    def _countable(self) -> ClusterSpec:
        if self.num_devices > MAX_DEVICES:
            raise ValueError(
                f"{self.num_nodes:,} nodes of {self.devices_per_node:,} devices are {self.num_devices:,}; "
                f"at most {MAX_DEVICES:,} can be planned for"
            )
        return self

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def host_is_device(self) -> bool:
        """Whether what a rank offloads to the host takes its own memory: of CPU ranks, unless more is stated."""
        return self.backend == "gloo" and self.host_memory_bytes is None

    def tier_bytes_per_s(self, tier: Tier) -> tuple[float, float] | None:
        """What one rank (reads, writes) where all of a node do so at once; None where it is not stated."""
        if tier == "cpu":
            own = self.device.memory_bandwidth_bytes_per_s if self.backend == "gloo" else None
            speed = self.host_bandwidth_bytes_per_s or own
            return None if speed is None else (speed, speed)
        read, write = self.disk_read_bytes_per_s, self.disk_write_bytes_per_s
        return None if read is None or write is None else (read / self.devices_per_node, write / self.devices_per_node)

    @property
    def usable_memory_bytes(self) -> int:
        return int(self.device.memory_bytes * self.usable_memory_fraction)
