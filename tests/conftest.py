"""Fixtures and switches that every kind of test needs; fixtures of one kind live in that kind's own conftest."""
