"""Land topics in Delta tables, exactly once."""
