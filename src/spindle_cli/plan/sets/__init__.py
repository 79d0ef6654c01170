"""Plans for the sets of tasks that steps run, beside the plan of all tasks."""
