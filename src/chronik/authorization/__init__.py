"""Who may do what: ACL bindings, and decisions with the semantics of Kafka's StandardAuthorizer.

Pure: it imports `wire` only. `metadata` stores the bindings, and `node` asks for decisions.
"""
