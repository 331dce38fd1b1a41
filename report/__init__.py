"""Reports: what became of workloads, as one HTML file with plots.

Takes summaries of runs, simulated or live, and knows nothing of how they were made.
``report.summary`` needs the standard library alone; plots need matplotlib (the extra
``report``), which is imported when the first one is drawn.
"""
