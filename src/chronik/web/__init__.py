"""A node's HTTP server: health, metrics, the JSON API and the web page. Nothing here changes the cluster."""
