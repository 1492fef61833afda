"""Tests of fxshard; they mirror the sources."""
