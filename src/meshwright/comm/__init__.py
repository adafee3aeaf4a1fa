"""Room `comm` (level 4): the one door to the network. The only room that may name `torch.distributed`.

mesh            axes of the device mesh → groups of ranks
collectives     raw forms over one axis, blocking and asynchronous
differentiable  the same for autograd, each with its adjoint
p2p             messages between two ranks of an axis
ledger          one row per call: primitive, axis, phase, bytes
transports/     how bytes move: alone (one rank), host (shared memory), gloo (sockets), nccl (GPU)
"""
