"""ZeRO in closed form: what N parameters over dp ranks hold and send at each stage.

| stage | divided over dp | bytes on a rank, 16 per parameter | elements sent per step and rank, ring |
| --- | --- | --- | --- |
| 0 | nothing | 16·N | 2·(dp−1)/dp·N, all-reduce |
| 1 | optimizer | 4·N + 12·N/dp | 2·(dp−1)/dp·N, reduce-scatter + all-gather |
| 2 | and gradients | 2·N + 14·N/dp | the same; gradients once per micro-batch |
| 3 | and parameters | 16·N/dp, and the layer that runs | 3·(dp−1)/dp·N, parameters gathered twice |

What a plan will hold and send, bucket by bucket and padded, is forecast by :mod:`meshwright.cost.memory` and
:mod:`meshwright.cost.traffic`.

Source: Rajbhandari et al. 2020 (ZeRO), §5 and table 1 (memory), §7 (communication).
"""

from __future__ import annotations

from meshwright.core.axes import DP
from meshwright.core.errors import InputError
from meshwright.core.measures import Traffic
from meshwright.core.precision import NUM_MOMENTS, Recipe

STAGES = (0, 1, 2, 3)


def zero_states_bytes(num_parameters: int, dp: int, stage: int, recipe: Recipe) -> dict[str, int]:
    """Bytes that each dp rank keeps under AdamW: `parameters`, `gradients` and `optimizer`.

    Layers that stage 3 has gathered, and buckets on their way, come on top.

    Args:
        num_parameters: N, those of one rank where the model is split by other axes too.
        dp: size of the data-parallel axis. Where it does not divide N, shards are padded.
        stage: 0 to 3.
        recipe: bytes of each copy.

    Raises InputError for another stage, or a dp below 1.
    """
    shard = _shard(num_parameters, dp, stage)

    def held(from_stage: int) -> int:
        return shard if stage >= from_stage else num_parameters

    return {
        "parameters": held(3) * recipe.parameter_bytes,
        "gradients": held(2) * recipe.gradient_bytes,
        "optimizer": held(1) * (recipe.master_bytes + NUM_MOMENTS["adamw"] * recipe.moment_bytes),
    }


def zero_traffic(
    num_parameters: int, dp: int, stage: int, recipe: Recipe, *, num_micro_batches: int = 1, gather_again: bool = True
) -> Traffic:
    """What one rank sends over dp in one step.

    Stages 2 and 3 reduce gradients as soon as they are ready, hence once per micro-batch: whole gradients that wait for
    the last micro-batch would be stage 1.

    Args:
        num_parameters, dp, stage, recipe: as in :func:`zero_states_bytes`.
        num_micro_batches: micro-batches per step and rank.
        gather_again: stage 3 frees parameters after forward and gathers them a second time for backward; False keeps
            them in between.

    Raises InputError for another stage, or a dp below 1.
    """
    padded = _shard(num_parameters, dp, stage) * dp
    gradients_bytes, parameters_bytes = padded * recipe.sent_gradient_bytes, padded * recipe.parameter_bytes
    total = Traffic()
    total.add(
        "reduce_scatter" if stage else "all_reduce",
        DP,
        "gradients",
        gradients_bytes,
        dp,
        num_micro_batches if stage >= 2 else 1,
    )
    if stage in (1, 2):
        total.add("all_gather", DP, "parameters", parameters_bytes, dp)
    if stage == 3:
        total.add("all_gather", DP, "forward", parameters_bytes, dp, num_micro_batches)
        total.add("all_gather", DP, "backward", parameters_bytes, dp, num_micro_batches * gather_again)
    return total


def _shard(num_parameters: int, dp: int, stage: int) -> int:
    """Elements of one rank's padded share."""
    if stage not in STAGES or dp < 1:
        raise InputError(f"ZeRO stage {stage} over {dp} ranks: stages go from 0 to 3, and at least 1 rank is needed")
    return -(-num_parameters // dp)
