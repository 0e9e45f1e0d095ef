; A masked store of truncated lanes whose constant mask has one lane set writes 4 bytes, not 2.
;
;   llc -mcpu=skylake-avx512 llvm-22-masked-store.ll -o -
;
; gives `vmovss %xmm0, (%rdi)`, which writes 4 bytes; right is `vpextrw $0, %xmm0, (%rdi)` or
; `movw %ax, (%rdi)`, as -mcpu=haswell gives. Seen with LLVM 22.1.0; the same text with
; two lanes set gives a correct `vpmovdw %zmm0, (%rdi) {%k1}`.

target triple = "x86_64-unknown-linux-gnu"

declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)

define void @one_lane(<16 x i32> %x, ptr %p) {
  %narrow = trunc <16 x i32> %x to <16 x i16>
  call void @llvm.masked.store.v16i16.p0(<16 x i16> %narrow, ptr %p, i32 2, <16 x i1> <i1 true, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false>)
  ret void
}
