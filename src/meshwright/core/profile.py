"""What a device's kernels reach, and how a training stack uses them: measured figures, as data.

    Profile   of a device: shares of its peaks, by kind of kernel      catalogue/devices.toml, table `profile`
    Stack     of the software that trains on it: what overlaps,         catalogue/stacks.toml
              what is fused, what each layer costs the host

Without a profile one share of the peak (`ClusterSpec.compute_efficiency`) stands for all kernels.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshwright.core.values import Value


class Host(Value):
    """Seconds that a rank's own Python takes beside kernels, where it computes on the host itself: they add up."""

    layer_s: float = Field(default=0.0, ge=0)
    """Of a layer and micro-batch, forward and backward; forward takes a third."""
    micro_batch_s: float = Field(default=0.0, ge=0)
    """Of a micro-batch on a stage, likewise."""
    call_s: float = Field(default=0.0, ge=0)
    """Of a collective, or of a message of attention, beside what the link takes: Python, waking up, and what is made
    ready for it and put together behind it."""
    step_s: float = Field(default=0.0, ge=0)
    """Of a step."""


class Server(Value):
    """What serving takes on a CPU rank beside what training tells."""

    few_rows: tuple[tuple[str, int, float], ...] = ()
    """(dtype, rows, FLOP/s) of products of few rows with weights as the server lays them out."""
    step_s: float = Field(default=0.0, ge=0)
    """Of the server's own code in a step, whatever its size: scheduling, choosing tokens."""
    layer_s: float = Field(default=0.0, ge=0)
    """Likewise of each layer."""
    sequence_s: float = Field(default=0.0, ge=0)
    """Likewise of each sequence that decodes."""


class Profile(Value):
    """Shares of a device's peaks that kernels reach in a training step."""

    matmul_efficiency: float = Field(gt=0, le=1)
    """Of peak FLOP/s, in a large matrix product; what small ones lose stands in their bytes."""
    num_units: int = Field(gt=0)
    """Multiprocessors, each of which computes one tile of a product at a time."""
    memory_efficiency: float = Field(gt=0, le=1)
    """Of memory bandwidth, in kernels that stream."""
    stream_passes: float = Field(default=1.0, ge=1)
    """Times that kernels between the products move their bytes, over those that fused ones must."""
    attention_efficiency: float = Field(gt=0, le=1)
    """Of peak FLOP/s, in fused attention over endless sequences, forward."""
    attention_half_keys: float = Field(default=0.0, ge=0)
    """Keys per query at which it reaches half of that."""
    overlap_slowdown: float = Field(default=1.0, ge=1)
    """Of compute while a collective runs beside it."""
    optimizer_passes: float = Field(default=1.0, gt=0)
    """Bytes that an update moves, over those that a fused one must."""
    host: Host = Host()
    server: Server = Server()
    source: str = ""


class Stack(Value):
    """How a training stack runs a step. The defaults are this library's own."""

    name: str = "meshwright"
    source: str = ""
    fused_attention: bool = True
    """Scores never leave the chip. Otherwise each kernel reads and writes them whole."""
    attention_share: float = Field(default=1.0, gt=0, le=1)
    """Of the device's rate of fused attention, that the stack's kernels reach: those of an earlier generation less."""
    dropout: bool = False
    """Masks are drawn, applied and kept."""
    overlaps_gradients: bool = True
    """Gradients are reduced while the last backward runs."""
    overlaps_parameters: bool = False
    """Updated parameters are gathered while the next forward runs."""
    exposed_gradient_share: float = Field(default=1.0, ge=0, le=1)
    """Of what the last backward leaves of reducing gradients and gathering parameters, that is seen: chunks of a stage
    that end earlier, and later forwards, hide the rest."""
    hidden_tensor_share: float = Field(default=0.0, ge=0, le=1)
    """Of tensor-parallel communication that runs under matrix products."""
    transfers: Literal["beside", "blocking", "blocking-scattered"] = "beside"
    """Between stages: beside compute, or the rank waits; scattered: each tp rank sends its part of a hidden state."""
    transfer_s: float = Field(default=0.0, ge=0)
    """Host seconds of a transfer that blocks: the device has nothing to do until the host has launched again."""
    layer_forward_s: float = Field(default=0.0, ge=0)
    """Host seconds to launch one layer's forward for one micro-batch: a floor under its kernels."""
    layer_backward_s: float = Field(default=0.0, ge=0)
    """Likewise backward, without recomputation."""
    experts_forward_s: float = Field(default=0.0, ge=0)
    """More, of a layer of experts: launches expert by expert, and the counts of rows that the host waits for."""
    experts_backward_s: float = Field(default=0.0, ge=0)
    """Likewise backward."""
    step_s: float = Field(default=0.0, ge=0)
    """Host seconds of a step, whatever its size: data, logging, scaling."""
    gradient_sum_bytes: dict[str, float] = Field(default_factory=dict)
    """Dtype of the parameters → bytes that each parameter of a stage moves to add a micro-batch's gradient to those
    before it, in a kernel of its own; nothing where the product that makes it adds it."""
    optimizer_passes: float = Field(default=1.0, gt=0)
    """Bytes that an update moves, over those that a fused one must."""
    ring_share: float | None = Field(default=None, gt=0, le=1)
    """ZeRO-3 gathers and reduces parameter by parameter, in one ring, at this share of what one network port reaches;
    None: in two levels, at that of all ports of a node."""
    overlap_slowdown: float | None = Field(default=None, ge=1)
    """Of compute beside collectives, where it is not the device's: hooks and streams of the stack's own."""
    copy_bytes: dict[str, float] = Field(default_factory=dict)
    """Dtype of the parameters → further bytes that each parameter of a rank takes."""
    shard_copy_bytes: dict[str, float] = Field(default_factory=dict)
    """Likewise each parameter of the rank's shard of the optimizer's state."""
    unsharded_copy_bytes: dict[str, float] = Field(default_factory=dict)
    """Likewise each parameter, where no optimizer state is sharded."""
    selective_share: float | None = Field(default=None, ge=0, le=1)
    """Of the products of a layer, that selective recomputation runs again, with all that streams; None: attention's
    core alone."""
    recompute: str | None = None
    """What is recomputed where a row does not say; None: not known, whatever is fastest and fits."""
    unties_embeddings: bool = False
    """The head has a weight of its own, whatever the model says."""
    keeps_outputs: bool = False
    """A pipeline keeps what a stage sends, of each micro-batch under way."""
    sharded_units: bool = False
    """ZeRO-3 gathers layers, embedding and head as units of PyTorch's first FSDP: memory as in `cost.unit_memory`."""
    vocabulary_apart: bool = False
    """Embedding and head are not tensor-parallel: each tp rank runs them on a part of the tokens."""
    norm_copies: int = Field(default=0, ge=0)
    """Further tensors of hidden size that a norm keeps, in the compute dtype, where it is written operation by
    operation: its input and what is normalised in fp32, the latter rounded, less the input that a fused one keeps."""
    fused_gates: bool = True
    """The activation of a gated MLP and its product with the other half are one kernel, and keep but what goes in."""
    keeps_fused_outputs: bool = False
    """What comes out of the joint products (q, k and v; gate and up) is kept beside the parts that are cut from it."""
    transposes: int = Field(default=0, ge=0)
    """Tensors of hidden size that attention keeps once more in another order, where a micro-batch has more than one
    sequence: hidden states are [s, b, h], its kernels take [b, s, h]."""
    gate_gradients: int = Field(default=0, ge=0)
    """Tensors of the feed-forward size that the backward of a gated MLP's activation holds beside what forward kept,
    together with the gradient of the weight behind it. 0: fused, they are never all there."""
    prefetches_embedding: bool = True
    """The embedding is gathered while the backward of the first layer runs."""
    num_sequence_buffers: int = Field(default=1, ge=0)
    """Buffers that stay, into which sequence parallelism gathers hidden states."""
    logit_bytes: float = Field(default=4.0, ge=0)
    """That the loss keeps of each logit."""
    loss_backward_bytes: float = Field(default=4.0, ge=0)
    """More, while its backward runs."""
    context_bytes: float = Field(default=0, ge=0)
    """Of the device's runtime, of collectives and of their buckets. 0: not stated, and a share of the device's memory
    is kept free for them (`usable_memory_fraction`)."""
    communicator_bytes: float = Field(default=0, ge=0)
    """More, for each kind of group in which a rank communicates: buffers of its channels."""
    allocator_reserve: float = Field(default=1.0, ge=1)
    """What the caching allocator holds, over what is in use at the peak."""
    scattered_rows: bool = False
    """Each tp rank sends the rows of its own part of the tokens to their experts, where tp gathers them; otherwise each
    sends all rows."""
    rows_once: bool = False
    """A row that several experts of a node, or of a rank, take travels there once, and is copied by fused kernels."""
    precisions: dict[str, str] = Field(default_factory=dict)
    """Dtype as sources print it → byte recipe, where it is not the one of that name."""


OWN = Stack()
"""This library's."""
