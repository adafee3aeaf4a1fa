"""The mesh of one rank whose peers are not there, for rehearsals: the real axes and the real ledger, and no network.

Tensors are on the meta device: they have shapes and no values, so that no call has anything to bring.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshwright.comm.ledger import Ledger
from meshwright.comm.mesh import Axis, Groups, Mesh
from meshwright.comm.transports.alone import Alone
from meshwright.comm.transports.fake import Fake
from meshwright.core.axes import coordinates_of

META = torch.device("meta")


def fake_mesh(rank: int, sizes: Mapping[str, int], groups: Mapping[str, Groups], ledger: Ledger) -> Mesh:
    """What :meth:`Mesh.create` makes on a real rank.

    Args:
        rank: global rank.
        sizes: axis → number of ranks, of all axes of `core.axes.MESH_ORDER`.
        groups: of :func:`meshwright.comm.mesh.axis_groups`.
        ledger: where the rank's calls are counted.
    """
    axes = {}
    for name, lines in groups.items():
        ranks = next(line for line in lines if rank in line)
        transport = Fake() if len(ranks) > 1 else Alone()
        axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, transport, None, META, ledger)
    return Mesh(rank, dict(sizes), coordinates_of(rank, sizes), axes, META, ledger)
