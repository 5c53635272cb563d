"""What SnapKV costs in quality on a user's own model: tasks, methods, runs and their report."""
