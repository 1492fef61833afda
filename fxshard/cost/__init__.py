"""Estimates over a graph: bytes and lifetimes."""
