"""SQL over topics without a JVM: DuckDB reads Arrow batches from the decoder of the Spark source."""
