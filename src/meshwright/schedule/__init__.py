"""Room `schedule` (level 1): pipeline timetables. Orders give compute actions, passes the rest. No torch."""
