"""What a person sees of a run: metrics, writers, logs, the terminal display, health lines, the report.

Nothing here trains, generates or decides; everything runs on rank 0 or offline, and nothing imports torch. `metrics`
and `metric_names` import no other module of ours and may be used by every room.
"""
