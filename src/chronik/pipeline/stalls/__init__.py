"""Find the periods in which traced partitions stalled, and their causes."""
