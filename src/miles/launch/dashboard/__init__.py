"""Package launch.dashboard: the HTTP server of the dashboard, its start beside a run, and reports as one HTML file.

Layer 4. It joins ``observe.dashboard``, which reads run directories, with tokenizers, the config and aiohttp.
"""
