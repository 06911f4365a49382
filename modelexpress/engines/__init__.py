"""Adapters of engines, one folder each. Plain modules need none."""
