; `llc -mattr=+f16c`: the sign comes from a double that is rounded to half on its way. LLVM drops
; the conversions, since they keep the sign, and rounds the double to half for the lowering of
; copysign: a call of __truncdfhf2, which no JIT has.
target triple = "x86_64-unknown-linux-gnu"

declare float @llvm.copysign.f32(float, float)

define i16 @f(double %x) #0 {
  %f = fptrunc double %x to float
  %h = fptrunc float %f to half
  %y = fpext half %h to float
  %z = call float @llvm.copysign.f32(float %y, float %y)
  %r = fptrunc float %z to half
  %i = bitcast half %r to i16
  ret i16 %i
}

attributes #0 = { "target-features"="+f16c,+avx2" }
