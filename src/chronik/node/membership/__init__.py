"""This node's membership in the cluster: Raft, metadata, peers, the controller, the broker session and its lease."""
