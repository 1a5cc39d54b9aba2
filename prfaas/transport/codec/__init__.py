"""Chunk encodings: lossless packing, the choice of packing, and 8-bit floats."""
