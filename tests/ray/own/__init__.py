"""An application or a cluster for each module: it is started, changed, scaled, damaged or stopped."""
