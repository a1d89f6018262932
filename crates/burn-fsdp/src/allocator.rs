//! A setting of the host's allocator that keeps freed memory in the process.
//!
//! On the CPU a step allocates and frees the same tensors as the previous step. glibc's allocator returns large ones to
//! the system each time, and then every page of the next tensor causes a fault. That costs a tenth of a step or more.

/// Asks the C library to keep the memory that this process frees, and to reuse it for later allocations. Returns true
/// if it will, and false if it has no such setting; only glibc on Linux has one. Programs with their own allocator
/// (`#[global_allocator]`) do not need it.
///
/// Blocks above 64 MiB are still returned to the system if a thread other than the main one allocates them.
///
/// Call it in programs that train on the CPU, before they allocate much, as the command does. The process then keeps
/// its peak memory, and somewhat more because of the gaps between tensors.
///
/// It changes nothing and returns false if the user has set `MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`,
/// `MALLOC_TOP_PAD_` or `GLIBC_TUNABLES`.
///
/// ```
/// burn_fsdp::allocator::keep_freed_memory();
/// ```
pub fn keep_freed_memory() -> bool {
    let names = [
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "GLIBC_TUNABLES",
    ];
    match names.iter().any(|name| std::env::var_os(name).is_some()) {
        true => false,
        false => keep(),
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(
    unsafe_code,
    reason = "the C library's settings are set by a call of it"
)]
fn keep() -> bool {
    /// Larger than most tensors of a step on a host, and small enough for the C library's int.
    const MOST: i32 = 1 << 30;
    /// The maximum mmap threshold that every version of glibc accepts.
    const MOST_OF_OLD: i32 = 32 << 20;
    /// Bytes by which the heap grows at a time.
    const GROWTH: i32 = 64 << 20;
    let set = |name, value| {
        // SAFETY: mallopt takes two numbers, and may be called at any time from any thread.
        unsafe { libc::mallopt(name, value) == 1 }
    };
    let on_heap = set(libc::M_MMAP_THRESHOLD, MOST) || set(libc::M_MMAP_THRESHOLD, MOST_OF_OLD);
    let grows = set(libc::M_TOP_PAD, GROWTH);
    set(libc::M_TRIM_THRESHOLD, MOST) && on_heap && grows
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn keep() -> bool {
    false
}
