"""Room `report` (level 8): tables and figures from artefacts; the same ones for terminal and HTML."""
