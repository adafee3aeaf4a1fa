"""Weights in several versions: the latest, and those that micro-batches under way still need (weight stashing).

    memory 0   | version 4: latest, the next update makes 5 in memory 2 |
    memory 1   | version 3: of a micro-batch whose backward is to come   |
    memory 2   | version 2: nobody needs it any more                     |

What it divides: nothing. What it needs: rule `asynchronous`. What it costs: `cost.memory`, parameters, times as many as
the schedule declares (`num_versions`). Nothing is copied but by an update whose older version is still needed: before a
forward or a backward the parameters are turned to the memory of their version, which stays as it is until no
micro-batch needs it. Optimizer state is there once.

Source: Narayanan et al. 2019 (SOSP), section 3.3; 2021 (ICML), section 3.1.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from meshwright.parallel.states import FlatStates, alias


class WeightVersions:
    """The versions of a rank's weights.

    Attributes:
        latest: number of updates since the pipeline was empty.
        most_kept: the largest number of versions that were needed at a time.
    """

    def __init__(self, states: FlatStates, num_versions: int) -> None:
        self._states = states
        self._memory = [[bucket.parameters for bucket in states.buckets]]
        self._memory += [[torch.zeros_like(b.parameters) for b in states.buckets] for _ in range(num_versions - 1)]
        self._views = [self._views_of(memory) for memory in self._memory]
        self._at = {0: 0}
        """Version → its memory."""
        self._placed = 0
        self.latest = 0
        self.most_kept = 1

    def _views_of(self, memory: list[torch.Tensor]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        buckets = zip(self._states.buckets, memory, strict=True)
        return [
            (self._states.parameters[slot.placement.key], bucket.view(alias(whole), slot))
            for bucket, whole in buckets
            for slot in bucket.layout.slots
        ]

    @property
    def memory(self) -> list[torch.Tensor]:
        """Of all versions."""
        return [whole for memory in self._memory for whole in memory]

    @property
    def further_bytes(self) -> int:
        """Of what is kept besides the parameters themselves."""
        return sum(whole.nbytes for memory in self._memory[1:] for whole in memory)

    def use(self, version: int) -> None:
        """Let the model run with the weights of `version`."""
        place = self._at[version]
        if place != self._placed:
            for parameter, view in self._views[place]:
                parameter.data = view
            self._placed = place

    @torch.no_grad()
    def add(self, needed: Container[int]) -> None:
        """A new latest version, equal to the one before, which an update may now change.

        Args:
            needed: versions that some micro-batch will still use.
        """
        before = self._at[self.latest]
        self._at = {version: place for version, place in self._at.items() if version in needed}
        place = before
        if self.latest in needed:
            place = next(place for place in range(len(self._memory)) if place not in self._at.values())
            for whole, source in zip(self._memory[place], self._memory[before], strict=True):
                whole.copy_(source)
        self.latest += 1
        self._at[self.latest] = place
        self.most_kept = max(self.most_kept, len(self._at))
        for bucket, whole in zip(self._states.buckets, self._memory[place], strict=True):
            bucket.parameters, bucket.own_parameters = whole, whole[bucket.own]

    def restart(self) -> None:
        """Nothing is under way: the latest is version 0 from here on."""
        self.use(self.latest)
        self._at, self.latest = {0: self._at[self.latest]}, 0
