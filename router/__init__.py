"""Flow control, load balancing and autoscaling: ordinary Python; Ray only in `serve_router.py`.

Read `types.py` first, then `dispatch.py`.
"""
