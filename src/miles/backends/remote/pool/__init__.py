"""Pool of remote engines: least-loaded dispatch, health monitoring, straggler detection (layer 3)."""
