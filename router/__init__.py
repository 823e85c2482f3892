"""Flow control, load balancing and autoscaling; only `serve_router.py` uses Ray.

Read `types.py` first, then `dispatch.py`.
"""
