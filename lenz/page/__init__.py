"""The report of a call, and its page: one HTML file that shows all of it and opens offline.

`explainer.py` sees the graphs while they are compiled. Everything after that is plain data, which
`write.py` puts into the page; the scripts beside it draw it.
"""
