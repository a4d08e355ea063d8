"""The record loses no sampled token: what stands in no trajectory is kept with its turn."""
