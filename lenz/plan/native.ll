; Helpers of every plan's native code, compiled once and kept in the store.
;
; A tensor is a handle of libtorch's C shim (aoti_torch_*): a pointer to an at::Tensor. The slots of a
; plan's function are two arrays of pointers: handles, which the function owns, and Python tensors.
; A function that fails returns null, or a status other than 0.

declare i32 @aoti_torch_delete_tensor_object(ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_get_data_ptr(ptr, ptr)
declare i32 @aoti_torch_get_device_index(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_storage_offset(ptr, ptr)
declare i32 @aoti_torch_get_storage_size(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr)
declare i32 @aoti_torch_new_uninitialized_tensor(ptr)
declare i32 @aoti_torch_zero_(ptr)
declare i32 @aoti_torch__reinterpret_tensor(ptr, i64, ptr, ptr, i64, ptr)
declare ptr @_Z16THPVariable_WrapRKN2at10TensorBaseE(ptr)
declare i64 @_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv()
declare void @_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE(ptr, i64)
declare void @_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev(ptr)
declare i32 @madvise(ptr, i64, i32)
declare void @PyErr_Clear()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyEval_SaveThread()
declare ptr @PyList_GetItem(ptr, i64)
declare ptr @PyList_New(i64)
declare i32 @PyList_SetItem(ptr, i64, ptr)
declare i32 @PyList_SetSlice(ptr, i64, i64, ptr)
declare i64 @PyList_Size(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare i64 @PyLong_AsLongLongAndOverflow(ptr, ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyObject_CallNoArgs(ptr)
declare ptr @PyObject_CallOneArg(ptr, ptr)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare ptr @PySequence_GetItem(ptr, i64)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare void @Py_DecRef(ptr)
declare void @Py_IncRef(ptr)

; These return the value that a call of the shim writes; -1 or null if it fails.
define ptr @data(ptr %handle) {
  %at = alloca ptr
  store ptr null, ptr %at
  call i32 @aoti_torch_get_data_ptr(ptr %handle, ptr %at)
  %value = load ptr, ptr %at
  ret ptr %value
}

define i64 @dim_of(ptr %handle) {
  %at = alloca i64
  store i64 -1, ptr %at
  call i32 @aoti_torch_get_dim(ptr %handle, ptr %at)
  %value = load i64, ptr %at
  ret i64 %value
}

define i32 @dtype_of(ptr %handle) {
  %at = alloca i32
  store i32 -1, ptr %at
  call i32 @aoti_torch_get_dtype(ptr %handle, ptr %at)
  %value = load i32, ptr %at
  ret i32 %value
}

define ptr @sizes_of(ptr %handle) {
  %at = alloca ptr
  store ptr null, ptr %at
  call i32 @aoti_torch_get_sizes(ptr %handle, ptr %at)
  %value = load ptr, ptr %at
  ret ptr %value
}

define ptr @strides_of(ptr %handle) {
  %at = alloca ptr
  store ptr null, ptr %at
  call i32 @aoti_torch_get_strides(ptr %handle, ptr %at)
  %value = load ptr, ptr %at
  ret ptr %value
}

define i64 @offset_of(ptr %handle) {
  %at = alloca i64
  store i64 -1, ptr %at
  call i32 @aoti_torch_get_storage_offset(ptr %handle, ptr %at)
  %value = load i64, ptr %at
  ret i64 %value
}

define i32 @index_of(ptr %handle) {
  %at = alloca i32
  store i32 -2, ptr %at
  call i32 @aoti_torch_get_device_index(ptr %handle, ptr %at)
  %value = load i32, ptr %at
  ret i32 %value
}

define i64 @bytes_of(ptr %handle) {
  %at = alloca i64
  store i64 -1, ptr %at
  call i32 @aoti_torch_get_storage_size(ptr %handle, ptr %at)
  %value = load i64, ptr %at
  ret i64 %value
}

; The value of a number; -1 if it is not an integer.
define i64 @whole(ptr %number) {
  %value = call i64 @PyLong_AsLongLong(ptr %number)
  %may = icmp eq i64 %value, -1
  br i1 %may, label %clear, label %done
clear:
  call void @PyErr_Clear()
  br label %done
done:
  ret i64 %value
}

; Whether a Python integer fits in 64 bits.
define i1 @fits_in_64_bits(ptr %number) {
  %at = alloca i32
  call i64 @PyLong_AsLongLongAndOverflow(ptr %number, ptr %at)
  %over = load i32, ptr %at
  %fits = icmp eq i32 %over, 0
  ret i1 %fits
}

; Whether the type of an object is one of two.
define i1 @is_either(ptr %object, i64 %a, i64 %b) {
  %at = getelementptr i8, ptr %object, i64 8
  %type = load i64, ptr %at
  %is_a = icmp eq i64 %type, %a
  %is_b = icmp eq i64 %type, %b
  %is = or i1 %is_a, %is_b
  ret i1 %is
}

; Whether the masked dispatch keys of a tensor are these.
define i1 @is_plain(ptr %handle, i64 %keys, i64 %mask, i64 %plain) {
  %implementation = load ptr, ptr %handle
  %at = getelementptr i8, ptr %implementation, i64 %keys
  %all = load i64, ptr %at
  %some = and i64 %all, %mask
  %is = icmp eq i64 %some, %plain
  ret i1 %is
}

define i64 @read_sizes(ptr %handle, i64 %dim) {
  %sizes = call ptr @sizes_of(ptr %handle)
  %at = getelementptr i64, ptr %sizes, i64 %dim
  %size = load i64, ptr %at
  ret i64 %size
}

define i64 @read_strides(ptr %handle, i64 %dim) {
  %strides = call ptr @strides_of(ptr %handle)
  %at = getelementptr i64, ptr %strides, i64 %dim
  %stride = load i64, ptr %at
  ret i64 %stride
}

; Whether a tensor has this dtype, these sizes and, where a size is above 1, these strides.
define i1 @fits(ptr %handle, i32 %dtype, i64 %rank, ptr %sizes, ptr %strides) {
  %code = call i32 @dtype_of(ptr %handle)
  %dim = call i64 @dim_of(ptr %handle)
  %same_code = icmp eq i32 %code, %dtype
  %same_dim = icmp eq i64 %dim, %rank
  %same = and i1 %same_code, %same_dim
  br i1 %same, label %begin, label %differs
begin:
  %own_sizes = call ptr @sizes_of(ptr %handle)
  %own_strides = call ptr @strides_of(ptr %handle)
  br label %next
next:
  %k = phi i64 [ 0, %begin ], [ %after, %good ]
  %more = icmp slt i64 %k, %rank
  br i1 %more, label %look, label %fit
look:
  %size_at = getelementptr i64, ptr %own_sizes, i64 %k
  %size = load i64, ptr %size_at
  %wanted_at = getelementptr i64, ptr %sizes, i64 %k
  %wanted = load i64, ptr %wanted_at
  %same_size = icmp eq i64 %size, %wanted
  br i1 %same_size, label %step, label %differs
step:
  %stride_at = getelementptr i64, ptr %own_strides, i64 %k
  %stride = load i64, ptr %stride_at
  %told_at = getelementptr i64, ptr %strides, i64 %k
  %told = load i64, ptr %told_at
  %same_stride = icmp eq i64 %stride, %told
  %short = icmp sle i64 %size, 1
  %either = or i1 %same_stride, %short
  br i1 %either, label %good, label %differs
good:
  %after = add i64 %k, 1
  br label %next
fit:
  ret i1 true
differs:
  ret i1 false
}

; Whether an object is a tensor of one of two types, with plain keys.
define i1 @is_plain_object(ptr %object, i64 %a, i64 %b, i64 %behind, i64 %keys, i64 %mask,
    i64 %plain) {
  %is_tensor = call i1 @is_either(ptr %object, i64 %a, i64 %b)
  br i1 %is_tensor, label %look, label %no
look:
  %handle = getelementptr i8, ptr %object, i64 %behind
  %is = call i1 @is_plain(ptr %handle, i64 %keys, i64 %mask, i64 %plain)
  ret i1 %is
no:
  ret i1 false
}

; Whether memory starts at a multiple of 16 bytes.
define i1 @is_aligned(ptr %handle) {
  %data = call ptr @data(ptr %handle)
  %start = ptrtoint ptr %data to i64
  %rest = and i64 %start, 15
  %is = icmp eq i64 %rest, 0
  ret i1 %is
}

; Whether the tensors of a list of arguments are as a plan was told. `rows` has 8-byte words for each:
;   0 its place in the list   3 their value in a plain tensor    5 the code of its dtype
;   1 its GPU, or -1          4 whether it has to start at a     6 its rank, then its sizes and strides;
;   2 the dispatch keys         multiple of 16 bytes               -1 if others check its layout
;     that are checked
; The tensors are put into `objects`, borrowed.
define i1 @are_as_told(ptr %list, i64 %n, ptr %rows, i64 %count, i64 %a, i64 %b, i64 %behind,
    i64 %keys, ptr %objects) {
  %length = call i64 @PyList_Size(ptr %list)
  %same_length = icmp eq i64 %length, %n
  br i1 %same_length, label %begin, label %no
begin:
  br label %next
next:
  %k = phi i64 [ 0, %begin ], [ %k_next, %good ]
  %row = phi ptr [ %rows, %begin ], [ %row_next, %good ]
  %more = icmp slt i64 %k, %count
  br i1 %more, label %look, label %yes
look:
  %place = load i64, ptr %row
  %object = call ptr @PyList_GetItem(ptr %list, i64 %place)
  %mask_at = getelementptr i64, ptr %row, i64 2
  %plain_at = getelementptr i64, ptr %row, i64 3
  %mask = load i64, ptr %mask_at
  %plain = load i64, ptr %plain_at
  %is_plain = call i1 @is_plain_object(ptr %object, i64 %a, i64 %b, i64 %behind, i64 %keys,
    i64 %mask, i64 %plain)
  br i1 %is_plain, label %gpu, label %no
gpu:
  %handle = getelementptr i8, ptr %object, i64 %behind
  %slot = getelementptr ptr, ptr %objects, i64 %k
  store ptr %object, ptr %slot
  %gpu_at = getelementptr i64, ptr %row, i64 1
  %gpu_told = load i64, ptr %gpu_at
  %is_anywhere = icmp slt i64 %gpu_told, 0
  br i1 %is_anywhere, label %start, label %index
index:
  %own_gpu = call i32 @index_of(ptr %handle)
  %own_gpu_wide = sext i32 %own_gpu to i64
  %same_gpu = icmp eq i64 %own_gpu_wide, %gpu_told
  br i1 %same_gpu, label %start, label %no
start:
  %aligned_at = getelementptr i64, ptr %row, i64 4
  %aligned = load i64, ptr %aligned_at
  %may_start = icmp eq i64 %aligned, 0
  br i1 %may_start, label %layout, label %align
align:
  %is_aligned = call i1 @is_aligned(ptr %handle)
  br i1 %is_aligned, label %layout, label %no
layout:
  %dtype_at = getelementptr i64, ptr %row, i64 5
  %dtype = load i64, ptr %dtype_at
  %code = trunc i64 %dtype to i32
  %rank_at = getelementptr i64, ptr %row, i64 6
  %rank = load i64, ptr %rank_at
  %sizes = getelementptr i64, ptr %row, i64 7
  %is_known = icmp sge i64 %rank, 0
  br i1 %is_known, label %fit, label %good
fit:
  %strides = getelementptr i64, ptr %sizes, i64 %rank
  %fits = call i1 @fits(ptr %handle, i32 %code, i64 %rank, ptr %sizes, ptr %strides)
  br i1 %fits, label %good, label %no
good:
  %held = phi i64 [ 0, %layout ], [ %rank, %fit ]
  %twice = mul i64 %held, 2
  %row_next = getelementptr i64, ptr %sizes, i64 %twice
  %k_next = add i64 %k, 1
  br label %next
yes:
  ret i1 true
no:
  ret i1 false
}

; Take ownership of the first objects.
define void @own(ptr %objects, i64 %count) {
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %more ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %more, label %done
more:
  %slot = getelementptr ptr, ptr %objects, i64 %k
  %object = load ptr, ptr %slot
  call void @Py_IncRef(ptr %object)
  %after = add i64 %k, 1
  br label %next
done:
  ret void
}

; Let other threads run Python, and stop them again.
define void @release(ptr %state) {
  %thread = call ptr @PyEval_SaveThread()
  store ptr %thread, ptr %state
  ret void
}

define void @hold(ptr %state) {
  %thread = load ptr, ptr %state
  call void @PyEval_RestoreThread(ptr %thread)
  ret void
}

; New memory in a slot; not 0 if there is none.
define i32 @empty(ptr %handles, i64 %k, i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %kind,
    i32 %device) {
  %slot = getelementptr ptr, ptr %handles, i64 %k
  call i32 @aoti_torch_empty_strided(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 %kind,
    i32 %device, ptr %slot)
  %handle = load ptr, ptr %slot
  %is_none = icmp eq ptr %handle, null
  %status = zext i1 %is_none to i32
  ret i32 %status
}

; Ask for huge pages (2 MiB = 2097152 bytes) if the memory spans two of them or more.
define void @advise(ptr %slot) {
  %handle = load ptr, ptr %slot
  %data = call ptr @data(ptr %handle)
  %bytes = call i64 @bytes_of(ptr %handle)
  %start = ptrtoint ptr %data to i64
  %raised = add i64 %start, 2097151
  %first = and i64 %raised, -2097152
  %end = add i64 %start, %bytes
  %last = and i64 %end, -2097152
  %length = sub i64 %last, %first
  %enough = icmp sgt i64 %length, 0
  %large = icmp sge i64 %bytes, 4194304
  %should = and i1 %enough, %large
  br i1 %should, label %ask, label %done
ask:
  %from = inttoptr i64 %first to ptr
  call i32 @madvise(ptr %from, i64 %length, i32 14)
  br label %done
done:
  ret void
}

; Empty a slot of a handle.
define void @delete(ptr %handles, i64 %k) {
  %slot = getelementptr ptr, ptr %handles, i64 %k
  %handle = load ptr, ptr %slot
  store ptr null, ptr %slot
  %is_none = icmp eq ptr %handle, null
  br i1 %is_none, label %done, label %some
some:
  call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  br label %done
done:
  ret void
}

; Empty a slot of an object.
define void @drop(ptr %objects, i64 %k) {
  %slot = getelementptr ptr, ptr %objects, i64 %k
  %object = load ptr, ptr %slot
  store ptr null, ptr %slot
  call void @Py_DecRef(ptr %object)
  ret void
}

; Make a Python tensor from a handle, and move it to the other slot.
define void @wrapped(ptr %handles, ptr %objects, i64 %k) {
  %from = getelementptr ptr, ptr %handles, i64 %k
  %to = getelementptr ptr, ptr %objects, i64 %k
  %handle = load ptr, ptr %from
  %object = call ptr @_Z16THPVariable_WrapRKN2at10TensorBaseE(ptr %handle)
  store ptr %object, ptr %to
  call void @delete(ptr %handles, i64 %k)
  ret void
}

; Set slots to null that hold nothing.
define void @clear(ptr %slots, i64 %count) {
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %more ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %more, label %done
more:
  %slot = getelementptr ptr, ptr %slots, i64 %k
  store ptr null, ptr %slot
  %after = add i64 %k, 1
  br label %next
done:
  ret void
}

; Empty all slots.
define void @clean(ptr %handles, ptr %objects, i64 %count) {
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %more ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %more, label %done
more:
  call void @delete(ptr %handles, i64 %k)
  call void @drop(ptr %objects, i64 %k)
  %after = add i64 %k, 1
  br label %next
done:
  ret void
}

; A view of a tensor, starting at one of its elements, in a slot.
define i32 @view(ptr %handle, i64 %rank, ptr %sizes, ptr %strides, i64 %offset, ptr %slot) {
  %status = call i32 @aoti_torch__reinterpret_tensor(ptr %handle, i64 %rank, ptr %sizes,
    ptr %strides, i64 %offset, ptr %slot)
  ret i32 %status
}

; A tensor of the same layout in the same memory, in a slot.
define i32 @alias(ptr %handle, ptr %slot) {
  %rank = call i64 @dim_of(ptr %handle)
  %sizes = call ptr @sizes_of(ptr %handle)
  %strides = call ptr @strides_of(ptr %handle)
  %status = call i32 @view(ptr %handle, i64 %rank, ptr %sizes, ptr %strides, i64 0, ptr %slot)
  ret i32 %status
}

; Another tensor in the memory of a dead one, from its first byte, in a slot.
define i32 @reuse(ptr %handle, i64 %rank, ptr %sizes, ptr %strides, ptr %slot) {
  %own = call i64 @offset_of(ptr %handle)
  %back = sub i64 0, %own
  %status = call i32 @view(ptr %handle, i64 %rank, ptr %sizes, ptr %strides, i64 %back, ptr %slot)
  ret i32 %status
}

; Call an op of libtorch below autograd: the guard created here excludes these keys.
define void @below(ptr %guard, i64 %keys) {
  call void @_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE(ptr %guard, i64 %keys)
  ret void
}

define void @above(ptr %guard) {
  call void @_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev(ptr %guard)
  ret void
}

; An undefined tensor (None in Python), in a slot.
define void @undefined(ptr %slot) {
  call i32 @aoti_torch_new_uninitialized_tensor(ptr %slot)
  ret void
}

; Call fail(step, status, tensors, numbers), which raises, with the contents of all slots, and empty
; them.
define void @failed(ptr %fail, i64 %step, i64 %status, ptr %handles, ptr %objects, i64 %count,
    ptr %numbers, i64 %sizes) {
  %given = alloca [4 x ptr]
  %tensors = call ptr @PyList_New(i64 %count)
  br label %next
next:
  %k = phi i64 [ 0, %0 ], [ %after, %put ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %look, label %rest
look:
  %handle_at = getelementptr ptr, ptr %handles, i64 %k
  %object_at = getelementptr ptr, ptr %objects, i64 %k
  %handle = load ptr, ptr %handle_at
  %is_none = icmp eq ptr %handle, null
  br i1 %is_none, label %own, label %wrap
wrap:
  call void @wrapped(ptr %handles, ptr %objects, i64 %k)
  br label %own
own:
  %object = load ptr, ptr %object_at
  store ptr null, ptr %object_at
  %is_empty = icmp eq ptr %object, null
  br i1 %is_empty, label %zero, label %put
zero:
  %nothing = call ptr @PyLong_FromLongLong(i64 0)
  br label %put
put:
  %item = phi ptr [ %object, %own ], [ %nothing, %zero ]
  call i32 @PyList_SetItem(ptr %tensors, i64 %k, ptr %item)
  %after = add i64 %k, 1
  br label %next
rest:
  %told = call ptr @PyList_New(i64 %sizes)
  br label %next_size
next_size:
  %n = phi i64 [ 0, %rest ], [ %n_after, %more_sizes ]
  %sizes_left = icmp slt i64 %n, %sizes
  br i1 %sizes_left, label %more_sizes, label %call
more_sizes:
  %number_at = getelementptr i64, ptr %numbers, i64 %n
  %number = load i64, ptr %number_at
  %value = call ptr @PyLong_FromLongLong(i64 %number)
  call i32 @PyList_SetItem(ptr %told, i64 %n, ptr %value)
  %n_after = add i64 %n, 1
  br label %next_size
call:
  %step_value = call ptr @PyLong_FromLongLong(i64 %step)
  %status_value = call ptr @PyLong_FromLongLong(i64 %status)
  %step_at = getelementptr ptr, ptr %given, i64 0
  %status_at = getelementptr ptr, ptr %given, i64 1
  %tensors_at = getelementptr ptr, ptr %given, i64 2
  %told_at = getelementptr ptr, ptr %given, i64 3
  store ptr %step_value, ptr %step_at
  store ptr %status_value, ptr %status_at
  store ptr %tensors, ptr %tensors_at
  store ptr %told, ptr %told_at
  call ptr @PyObject_Vectorcall(ptr %fail, ptr %given, i64 4, ptr null)
  call void @Py_DecRef(ptr %step_value)
  call void @Py_DecRef(ptr %status_value)
  call void @Py_DecRef(ptr %tensors)
  call void @Py_DecRef(ptr %told)
  ret void
}

; The quotient rounded down, as in Python. By 0 it is that by 1, as in kernels: an assertion that
; comes later raises.
define i64 @floor_div(i64 %a, i64 %by) {
  %is_zero = icmp eq i64 %by, 0
  %b = select i1 %is_zero, i64 1, i64 %by
  %quotient = sdiv i64 %a, %b
  %rest = srem i64 %a, %b
  %sign = xor i64 %rest, %b
  %opposite = icmp slt i64 %sign, 0
  %some = icmp ne i64 %rest, 0
  %lower = and i1 %opposite, %some
  %less = sext i1 %lower to i64
  %result = add i64 %quotient, %less
  ret i64 %result
}
