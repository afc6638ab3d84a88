"""Environments that answer a model between its turns, for `rollout.environment`; how a run calls them is `rollout`."""
