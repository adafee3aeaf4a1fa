"""Offload: tensors that leave the device between their uses, for the memory of the host or a disk.

What it divides: nothing; what is left on a rank is kept elsewhere, and comes back one group, or one layer, at a time.
What it needs: for gradients zero=2 or 3, for parameters zero=3; for the disk a folder of each node's own.
What it costs: `cost.offload`: bytes on a tier, bytes that pass per step, the working set that stays.

    device              host (`tier`) or disk (`disk`)
    ┌─────────────┐     ┌──────────────────────────────┐
    │ 3 buffers   │◀───▶│ master, moments    group 0   │     `stream`   update group by group
    │ of a group  │     │                    group 1   │     `delayed`  in the background, one step late
    └─────────────┘     │                    ...       │     `folder`   whose files these are
                        └──────────────────────────────┘     `store`    all that a rank keeps
    kept activations    host, a layer at a time              `activations`

Sources: Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity).
"""
