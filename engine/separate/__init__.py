"""``rollout.mode = "separate"``: a training mesh, and rollout nodes that pull work from its head and push results."""
