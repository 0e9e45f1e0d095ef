"""aten -> Graph, define-by-run: one family of ops per file, each lowering a function of indices."""

from lenz.lower import bag as bag
from lenz.lower import complex_math as complex_math
from lenz.lower import distance as distance
from lenz.lower import factory as factory
from lenz.lower import foreach as foreach
from lenz.lower import index as index
from lenz.lower import loss as loss
from lenz.lower import nll as nll
from lenz.lower import norm as norm
from lenz.lower import norm_backward as norm_backward
from lenz.lower import pointwise as pointwise
from lenz.lower import pool as pool
from lenz.lower import random as random
from lenz.lower import reduce as reduce
from lenz.lower import sample as sample
from lenz.lower import scan as scan
from lenz.lower import scatter as scatter
from lenz.lower import search as search
from lenz.lower import shape as shape
from lenz.lower import softmax as softmax
from lenz.lower import sort as sort
from lenz.lower import special as special
from lenz.lower import unfold as unfold
from lenz.lower import view as view
from lenz.lower.registry import native_ops as native_ops
from lenz.lower.walk import lower as lower
