"""The Megatron side: bring-up, model building, forward and backward steps; nothing here knows of rollouts or HTTP.

Importing this package imports neither torch nor Megatron: import the module that you need.
"""
