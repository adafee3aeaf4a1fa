"""Room `checkpoint` (level 6): training state, saved under one strategy and loaded under any other."""

from meshwright.checkpoint.pieces import Piece, bucket_pieces, flat_pieces, rectangles
from meshwright.checkpoint.store import latest, load, peek, save

__all__ = ["Piece", "bucket_pieces", "flat_pieces", "latest", "load", "peek", "rectangles", "save"]
