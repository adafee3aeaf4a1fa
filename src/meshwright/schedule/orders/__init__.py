"""One file per schedule. A module here declares `SCHEDULE`, a :class:`~meshwright.core.schedule.Schedule`.

The file is the whole price of a schedule: :func:`meshwright.core.schedule.schedules` finds it by its being here.
"""
