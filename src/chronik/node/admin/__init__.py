"""What the admin APIs share: configs, topic creation, plans for partitions."""
