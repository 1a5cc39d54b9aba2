"""The capacity planner's command: its files, its catalog, its reports and its plots."""
