"""The last import of a process that forks: no fork walks, or copies, what it shares with others.

Otherwise each fork would do so at its end: half of the time of a short program.
"""

import gc

gc.collect()
gc.freeze()
