"""The Spark sink `chronik`: rows become a topic's records, each micro-batch in one transaction."""
