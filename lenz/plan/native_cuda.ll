; What the native code of plans for GPUs calls besides native.ll.

declare i32 @aoti_torch_get_current_cuda_stream(i32, ptr)
declare i8 @_ZN3c104cuda14ExchangeDeviceEa(i8)
declare i32 @cuLaunchKernelEx(ptr, ptr, ptr, ptr)

; The driver's handle of a GPU's current stream.
define ptr @stream_of(i32 %device) {
  %at = alloca ptr
  store ptr null, ptr %at
  call i32 @aoti_torch_get_current_cuda_stream(i32 %device, ptr %at)
  %stream = load ptr, ptr %at
  ret ptr %stream
}

; Make a GPU current; the one that was.
define i32 @exchange(i32 %device) {
  %narrow = trunc i32 %device to i8
  %before = call i8 @_ZN3c104cuda14ExchangeDeviceEa(i8 %narrow)
  %wide = sext i8 %before to i32
  ret i32 %wide
}

; Launch a kernel of `count` arguments of 8 bytes each; the driver's status.
;
; `record` is CUlaunchConfig of the CUDA driver API (56 bytes: grid x y z, block x y z, shared memory,
; 4 bytes of padding, stream at 32, attributes at 40, their number at 48), then the kernel's handle.
; The kernel may have up to 4 hidden arguments, which are null.
define i32 @launch(ptr %record, ptr %stream, i64 %grid, ptr %values, i64 %count) {
  %is_empty = icmp eq i64 %grid, 0
  br i1 %is_empty, label %nothing, label %start
start:
  %config = alloca [56 x i8], align 8
  %null = alloca i64
  store i64 0, ptr %null
  call void @llvm.memcpy.p0.p0.i64(ptr align 8 %config, ptr align 8 %record, i64 56, i1 false)
  %programs = trunc i64 %grid to i32
  store i32 %programs, ptr %config
  %stream_at = getelementptr i8, ptr %config, i64 32
  store ptr %stream, ptr %stream_at
  %kernel_at = getelementptr i8, ptr %record, i64 56
  %kernel = load ptr, ptr %kernel_at
  %places = add i64 %count, 4
  %table = alloca ptr, i64 %places
  br label %next
next:
  %k = phi i64 [ 0, %start ], [ %after, %put ]
  %left = icmp slt i64 %k, %places
  br i1 %left, label %put, label %call
put:
  %is_own = icmp slt i64 %k, %count
  %value_at = getelementptr i64, ptr %values, i64 %k
  %told = select i1 %is_own, ptr %value_at, ptr %null
  %at = getelementptr ptr, ptr %table, i64 %k
  store ptr %told, ptr %at
  %after = add i64 %k, 1
  br label %next
call:
  %status = call i32 @cuLaunchKernelEx(ptr %config, ptr %kernel, ptr %table, ptr null)
  ret i32 %status
nothing:
  ret i32 0
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
