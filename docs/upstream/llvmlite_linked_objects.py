"""llvmlite keeps about 10 KiB of each object that it links, after the object is dropped.

`JITLibraryBuilder.link` makes a library of the ExecutionSession (a JITDylib of LLVM's ORC) for
each object. The resource tracker frees the code; nothing removes the library. Prints the bytes
of malloc that are in use after each 1,000 objects (Linux, glibc 2.33 or newer).
"""

import ctypes
import gc

import llvmlite.binding as llvm


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: ten sizes, of which the eighth is what is in use."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def in_use() -> int:
    """Bytes that malloc has handed out."""
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Mallinfo
    return int(ask().sizes[7])


llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
obj = machine.emit_object(llvm.parse_assembly("define i64 @one() { ret i64 1 }"))
jit = llvm.create_lljit_compiler(use_jit_link=True)
for k in range(4_001):
    tracker = llvm.JITLibraryBuilder().add_object_img(obj).export_symbol("one").link(jit, f"l{k}")
    del tracker
    if k % 1_000 == 0:
        print(f"{k} objects: {in_use() / 2**10:.0f} KiB")
