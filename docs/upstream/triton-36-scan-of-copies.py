"""The last row of a scan takes a carry from the wrong lane where lanes hold copies of the row.

    TRITON_CACHE_DIR=/tmp/t python triton-36-scan-of-copies.py    # needs a GPU, or read the PTX

`x` is 1 x 16 in a layout of 4 x 8 lanes (that of the store): 2 numbers in each lane, each row of 8
lanes held four times. The carry from the first 8 numbers to the second is read with `shfl.idx 7`,
as if neighbours in the row were neighbours in the warp; 28 would be right, and is what Triton 3.7
has. out[8] is x[0] + x[1] + x[8] instead of the sum of x[:9].
"""

import torch
import triton
import triton.language as tl


@triton.jit
def k(a, out):
    p = tl.arange(0, 4)[:, None]
    r = tl.arange(0, 16)[None, :]
    x = tl.load(a + 3 * r)
    tl.store(out + (p + 4 * r), tl.associative_scan(x, 1, add))


@triton.jit
def add(x, y):
    return x + y


if __name__ == "__main__":
    a = torch.arange(48, device="cuda", dtype=torch.int32)
    out = torch.empty(16, 4, device="cuda", dtype=torch.int32)
    k[(1,)](a, out, num_warps=1)
    print(torch.equal(out[:, 0], a[::3].cumsum(0).to(torch.int32)), out[:, 0])
