"""Share groups (KIP-932) on the leaders of their partitions: sessions of members, and the records in flight."""
