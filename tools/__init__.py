"""Thin command lines over the package, and benchmarks; nothing in megatron_rl imports from here."""
