"""Who a client is: SASL mechanisms, server and client side, and principals of certificates.

Pure: it imports `wire` only, and never waits. `node` runs the server side, `client` the client side.
"""
