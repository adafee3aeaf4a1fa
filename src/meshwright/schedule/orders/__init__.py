"""One file per schedule. A module here has `NAME` and `order(num_stages, num_micro_batches)`, and no communication.

The file is the whole price of a schedule: :mod:`meshwright.schedule.build` finds it by its `NAME`.
"""
