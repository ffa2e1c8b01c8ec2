"""The long-running job: stages, schedule, checkpoints and resume, metrics, progress, the summary."""
