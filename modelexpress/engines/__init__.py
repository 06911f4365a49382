"""Adapters of engines, one folder each. None is in this version; plain modules need none."""
