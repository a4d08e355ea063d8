"""The node: ports, config, sessions, gateway, trajectories, rollout, learner and the record of a run.

``ports`` says what it asks of the world; it names no vendor. Importing it loads neither torch nor transformers.
"""

__version__ = "0.1.0"
