"""Inference engines behind the engine's StepEngine port."""
