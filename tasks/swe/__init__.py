"""Repair of real repositories from public data sets: SWE-bench and its relatives, R2E-Gym."""
