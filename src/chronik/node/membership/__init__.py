"""This node's place in the cluster: Raft, metadata, peers, the controller, the broker session and its lease."""
