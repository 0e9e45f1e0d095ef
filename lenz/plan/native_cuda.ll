; Further helpers of native code for GPUs, besides native.ll.

declare i32 @aoti_torch_get_current_cuda_stream(i32, ptr)
declare i8 @_ZN3c104cuda14ExchangeDeviceEa(i8)
declare i8 @_ZN3c104cuda19MaybeExchangeDeviceEa(i8)
declare i32 @cuCtxGetCurrent(ptr)
declare i32 @cuCtxSetCurrent(ptr)
declare i32 @cuDeviceGet(ptr, i32)
declare i32 @cuDevicePrimaryCtxRetain(ptr, i32)
declare i32 @cuGraphExecKernelNodeSetParams_v2(ptr, ptr, ptr)
declare i32 @cuGraphLaunch(ptr, ptr)
declare i32 @cuLaunchKernelEx(ptr, ptr, ptr, ptr)
declare i32 @cuStreamIsCapturing(ptr, ptr)

; The driver's handle of a GPU's current stream.
define ptr @stream_of(i32 %device) {
  %at = alloca ptr
  store ptr null, ptr %at
  call i32 @aoti_torch_get_current_cuda_stream(i32 %device, ptr %at)
  %stream = load ptr, ptr %at
  ret ptr %stream
}

; Not 0 if a stream is captured.
define i64 @captured(ptr %stream) {
  %at = alloca i32
  store i32 0, ptr %at
  call i32 @cuStreamIsCapturing(ptr %stream, ptr %at)
  %status = load i32, ptr %at
  %wide = zext i32 %status to i64
  ret i64 %wide
}

; Make a GPU current; returns the previous one.
define i32 @exchange(i32 %device) {
  %narrow = trunc i32 %device to i8
  %before = call i8 @_ZN3c104cuda14ExchangeDeviceEa(i8 %narrow)
  %wide = sext i8 %before to i32
  call void @attach(i32 %device)
  ret i32 %wide
}

; Make the caller's GPU current again. It gets no context if it has none: a context takes memory.
define void @restore(i32 %device) {
  %narrow = trunc i32 %device to i8
  call i8 @_ZN3c104cuda19MaybeExchangeDeviceEa(i8 %narrow)
  ret void
}

; Give this thread the GPU's context if it has none. CUDA's runtime does so by itself, but the driver's
; launches do not, and a thread whose memory comes from the cache may not have called the runtime yet.
define void @attach(i32 %device) {
  %context = alloca ptr
  %number = alloca i32
  store ptr null, ptr %context
  call i32 @cuCtxGetCurrent(ptr %context)
  %current = load ptr, ptr %context
  %is_new = icmp eq ptr %current, null
  br i1 %is_new, label %new, label %done
new:
  store i32 0, ptr %number
  call i32 @cuDeviceGet(ptr %number, i32 %device)
  %told = load i32, ptr %number
  call i32 @cuDevicePrimaryCtxRetain(ptr %context, i32 %told)
  %primary = load ptr, ptr %context
  call i32 @cuCtxSetCurrent(ptr %primary)
  br label %done
done:
  ret void
}

; Launch a kernel with `count` arguments of 8 bytes each; returns the driver's status.
;
; `record` is CUlaunchConfig of the CUDA driver API (56 bytes: grid x y z, block x y z, shared memory,
; 4 bytes of padding, stream at 32, attributes at 40, their number at 48), then the kernel's handle,
; then what is not 0 once it was captured: the graph does not hold the kernel. lenz's own do, and are
; captured by Python.
; The kernel may have up to 4 hidden arguments, which are null.
define i32 @launch(ptr %record, ptr %stream, i64 %grid, ptr %values, i64 %count, i64 %captured) {
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
  %is_captured = icmp ne i64 %captured, 0
  br i1 %is_captured, label %note, label %run
note:
  %noted_at = getelementptr i8, ptr %record, i64 64
  store i64 %captured, ptr %noted_at
  br label %run
run:
  %status = call i32 @cuLaunchKernelEx(ptr %config, ptr %kernel, ptr %table, ptr null)
  ret i32 %status
nothing:
  ret i32 0
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

; The record of a CUDA graph is a row of 8-byte words (runtime/captured.py):
;   0 the executable graph          5 sizes that it was made for      10 addresses that may change
;   1 its stream                    6 their number                    11 their number
;   2 pinned arguments: pairs of    7 kept memory: pairs of the       12 nodes that use them
;     an argument's number and        address of its count of owners  13 their number
;     its address                     and that count without others   14 number of replays
;                                                                     15 whether a call is running
;   3 their number                  8 their number

define i64 @word(ptr %record, i64 %k) {
  %at = getelementptr i64, ptr %record, i64 %k
  %value = load i64, ptr %at
  ret i64 %value
}

define ptr @list(ptr %record, i64 %k) {
  %at = getelementptr ptr, ptr %record, i64 %k
  %value = load ptr, ptr %at
  ret ptr %value
}

; Whether a graph may be replayed: the stream is its own and not being captured, pinned arguments have
; not moved, the sizes are the same, and nobody else holds its kept memory.
define i1 @ready(ptr %record, ptr %stream, ptr %starts, ptr %sizes) {
  %status = alloca i32
  store i32 1, ptr %status
  %own = call ptr @list(ptr %record, i64 1)
  %same_stream = icmp eq ptr %own, %stream
  br i1 %same_stream, label %ask, label %no
ask:
  call i32 @cuStreamIsCapturing(ptr %stream, ptr %status)
  %capturing = load i32, ptr %status
  %is_free = icmp eq i32 %capturing, 0
  br i1 %is_free, label %pins, label %no
pins:
  %pinned = call ptr @list(ptr %record, i64 2)
  %pinned_count = call i64 @word(ptr %record, i64 3)
  br label %pin
pin:
  %p = phi i64 [ 0, %pins ], [ %p_next, %pin_same ]
  %p_more = icmp slt i64 %p, %pinned_count
  br i1 %p_more, label %pin_look, label %shapes
pin_look:
  %p_twice = mul i64 %p, 2
  %p_value = add i64 %p_twice, 1
  %argument = call i64 @word(ptr %pinned, i64 %p_twice)
  %wanted = call i64 @word(ptr %pinned, i64 %p_value)
  %start = call i64 @word(ptr %starts, i64 %argument)
  %p_next = add i64 %p, 1
  %is_there = icmp eq i64 %start, %wanted
  br i1 %is_there, label %pin_same, label %no
pin_same:
  br label %pin
shapes:
  %made = call ptr @list(ptr %record, i64 5)
  %made_count = call i64 @word(ptr %record, i64 6)
  br label %size
size:
  %s = phi i64 [ 0, %shapes ], [ %s_next, %size_same ]
  %s_more = icmp slt i64 %s, %made_count
  br i1 %s_more, label %size_look, label %keeps
size_look:
  %made_for = call i64 @word(ptr %made, i64 %s)
  %given = call i64 @word(ptr %sizes, i64 %s)
  %s_next = add i64 %s, 1
  %is_same = icmp eq i64 %made_for, %given
  br i1 %is_same, label %size_same, label %no
size_same:
  br label %size
keeps:
  %kept = call ptr @list(ptr %record, i64 7)
  %kept_count = call i64 @word(ptr %record, i64 8)
  br label %keep
keep:
  %k = phi i64 [ 0, %keeps ], [ %k_next, %keep_free ]
  %k_more = icmp slt i64 %k, %kept_count
  br i1 %k_more, label %keep_look, label %yes
keep_look:
  %k_twice = mul i64 %k, 2
  %k_value = add i64 %k_twice, 1
  %count_at = call ptr @list(ptr %kept, i64 %k_twice)
  %alone = call i64 @word(ptr %kept, i64 %k_value)
  %owners = load i32, ptr %count_at
  %owners_wide = zext i32 %owners to i64
  %k_next = add i64 %k, 1
  %is_alone = icmp ule i64 %owners_wide, %alone
  br i1 %is_alone, label %keep_free, label %no
keep_free:
  br label %keep
yes:
  ret i1 true
no:
  ret i1 false
}

; Start a call of a plan at its first graph; false if another call is running, in another thread or
; around this one, since graphs pass values to one another in their memory.
define i1 @enter(ptr %record) {
  %at = getelementptr i64, ptr %record, i64 15
  %busy = load i64, ptr %at
  %is_free = icmp eq i64 %busy, 0
  br i1 %is_free, label %take, label %no
take:
  store i64 1, ptr %at
  ret i1 true
no:
  ret i1 false
}

define void @leave(ptr %record) {
  %at = getelementptr i64, ptr %record, i64 15
  store i64 0, ptr %at
  ret void
}

; Replay a graph with these addresses; returns the driver's status.
;
; An address that may change has 3 words: the present address, a list, and its length. The list is of
; triples: a word of a node's arguments, an offset to the address, the node's number. A node has
; 3 words: its handle, its parameters, and whether they have changed.
define i32 @replay(ptr %record, ptr %stream, i64 %grid, ptr %values, i64 %count) {
  %exec = call ptr @list(ptr %record, i64 0)
  %places = call ptr @list(ptr %record, i64 10)
  %nodes = call ptr @list(ptr %record, i64 12)
  %node_count = call i64 @word(ptr %record, i64 13)
  %replays_at = getelementptr i64, ptr %record, i64 14
  %replays = load i64, ptr %replays_at
  %replays_next = add i64 %replays, 1
  store i64 %replays_next, ptr %replays_at
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %done ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %look, label %tell
look:
  %after = add i64 %k, 1
  %value = call i64 @word(ptr %values, i64 %k)
  %offset = mul i64 %k, 3
  %place = getelementptr i64, ptr %places, i64 %offset
  %present = call i64 @word(ptr %place, i64 0)
  %is_same = icmp eq i64 %present, %value
  br i1 %is_same, label %done, label %change
change:
  store i64 %value, ptr %place
  %list = call ptr @list(ptr %place, i64 1)
  %length = call i64 @word(ptr %place, i64 2)
  br label %entry
entry:
  %e = phi i64 [ 0, %change ], [ %e_next, %write ]
  %e_more = icmp slt i64 %e, %length
  br i1 %e_more, label %write, label %done
write:
  %e_offset = mul i64 %e, 3
  %triple = getelementptr i64, ptr %list, i64 %e_offset
  %target = call ptr @list(ptr %triple, i64 0)
  %added = call i64 @word(ptr %triple, i64 1)
  %number = call i64 @word(ptr %triple, i64 2)
  %sum = add i64 %value, %added
  store i64 %sum, ptr %target
  %node_offset = mul i64 %number, 3
  %flag_offset = add i64 %node_offset, 2
  %flag_at = getelementptr i64, ptr %nodes, i64 %flag_offset
  store i64 1, ptr %flag_at
  %e_next = add i64 %e, 1
  br label %entry
done:
  br label %next
tell:
  %n = phi i64 [ 0, %next ], [ %n_next, %told ]
  %n_more = icmp slt i64 %n, %node_count
  br i1 %n_more, label %node, label %go
node:
  %n_next = add i64 %n, 1
  %n_offset = mul i64 %n, 3
  %this = getelementptr i64, ptr %nodes, i64 %n_offset
  %changed = call i64 @word(ptr %this, i64 2)
  %is_changed = icmp ne i64 %changed, 0
  br i1 %is_changed, label %set, label %told
set:
  %changed_at = getelementptr i64, ptr %this, i64 2
  store i64 0, ptr %changed_at
  %handle = call ptr @list(ptr %this, i64 0)
  %parameters = call ptr @list(ptr %this, i64 1)
  %is_set = call i32 @cuGraphExecKernelNodeSetParams_v2(ptr %exec, ptr %handle, ptr %parameters)
  %set_fails = icmp ne i32 %is_set, 0
  br i1 %set_fails, label %failed, label %told
told:
  br label %tell
go:
  %launched = call i32 @cuGraphLaunch(ptr %exec, ptr %stream)
  ret i32 %launched
failed:
  ret i32 %is_set
}
