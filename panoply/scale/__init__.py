"""A run on several processes, GPUs and machines. Nothing here is imported by a run that is not spread."""
