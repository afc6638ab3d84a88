"""Processes that make the requests to the engines: JSON is written and read there, the controller only schedules.

A worker holds no state beyond the requests it is making; what it answers is whole segments, as arrays.
"""
