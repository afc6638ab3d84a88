"""Rollouts: the record that travels, the client of the engines, the controller, and the trainer's side of it.

Imports neither torch nor Megatron: the controller starts in a fraction of a second.
"""
