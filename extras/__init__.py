"""What stands beside the six files: each file one job, run as `python -m extras.NAME`. Delete the
folder and everything above it still works."""
