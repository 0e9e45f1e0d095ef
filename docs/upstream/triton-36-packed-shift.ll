; A flag that does not hold in one lane, which nobody reads, makes the other lane wrong.
;
;   llc -mcpu=sm_90a -mattr=+ptx87 triton-36-packed-shift.ll -o -
;
; stores (block << 5) | (tid >> 1) where block << 5 is right: both lanes are packed in 64 bits, and
; `shl nuw` of lane 0 by 31 becomes `mul.wide.u32 tid, 2147483648`, whose upper half is or'ed with
; lane 1. Without `nuw nsw` it is right. The SLP vectoriser makes such lanes of one `and` and one
; `shl`. Seen with the LLVM of Triton 3.6; that of Triton 3.7 does not pack the lanes.

define ptx_kernel void @k(ptr addrspace(1) %out, i32 %block, i32 %n) {
  %tid = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %p = getelementptr i32, ptr addrspace(1) %out, i32 %tid
  %a = insertelement <2 x i32> poison, i32 %tid, i64 0
  %v = insertelement <2 x i32> %a, i32 %block, i64 1
  %s = shl nuw nsw <2 x i32> %v, <i32 31, i32 5>
  %w = shufflevector <2 x i32> %s, <2 x i32> poison, <4 x i32> <i32 1, i32 1, i32 1, i32 1>
  %z = or <4 x i32> %w, <i32 0, i32 4, i32 8, i32 12>
  %y = insertelement <4 x i32> poison, i32 %n, i64 0
  %x = shufflevector <4 x i32> %y, <4 x i32> poison, <4 x i32> zeroinitializer
  %c = icmp slt <4 x i32> %z, %x
  %c1 = extractelement <4 x i1> %c, i64 1
  br i1 %c1, label %t, label %u
t:
  %e = extractelement <2 x i32> %s, i64 1
  store i32 %e, ptr addrspace(1) %p
  br label %u
u:
  ret void
}
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
