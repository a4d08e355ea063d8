"""Curriculum: which samples come next, from what earlier trials of them showed."""
