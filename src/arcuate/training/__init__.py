"""Training: loop, optimizer, schedules, guard, checkpoints, curriculum, several processes, tracking."""
