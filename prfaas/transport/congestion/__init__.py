"""Pure estimators: link rate, connection count, rate budgets, stalled and unreachable peers."""
