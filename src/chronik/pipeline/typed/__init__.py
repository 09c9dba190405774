"""Decode the values and keys of records by their schemas into Arrow columns, and change a table's columns with them."""
