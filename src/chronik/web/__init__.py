"""A node over HTTP: health, metrics, and later the API and the page. Nothing here changes the cluster."""
