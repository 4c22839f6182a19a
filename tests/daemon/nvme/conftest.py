"""Fixtures that more than one file of these tests needs."""

from __future__ import annotations

from catalog_bench import bench

__all__ = ["bench"]
