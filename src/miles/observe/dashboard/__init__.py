"""Package observe.dashboard: what the dashboard shows of run directories, as JSON values, and its web pages.

Layer 1. Imports: core, observe; numpy and pyarrow. It only reads files of runs, and knows no HTTP: the server is in
``launch.dashboard``, which also writes the same values into one HTML file.
"""
