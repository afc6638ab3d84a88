"""One run as steps of a Slurm allocation: placed, started, watched, tried again, put back into the queue."""
