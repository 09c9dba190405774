"""The Spark source `chronik`: plan offset ranges, fetch them from the leaders, and decode records into Arrow."""
