"""Search, measure, select, promote."""
