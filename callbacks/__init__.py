"""Lightning callbacks: checkpoints, schedules, guards and reports."""
