//! An allocator setting that keeps freed memory in the process.
//!
//! A training step on the CPU allocates and frees the same tensors as the step before. glibc returns large blocks to
//! the system each time, so every page of the next tensor faults. This costs at least a tenth of a step.

/// Makes the C library keep freed memory and reuse it for later allocations. Returns true on success, and false if the
/// library has no such setting: only glibc on Linux has one. Programs with their own allocator (`#[global_allocator]`)
/// do not need it.
///
/// Some blocks are still returned to the system: blocks above 64 MiB that a thread other than the main one allocates,
/// and, with old versions of glibc, all blocks above 32 MiB.
///
/// Call it at the start of a program that trains on the CPU, as the `burn-fsdp` command does. The process then stays at
/// its peak memory, plus some fragmentation between tensors.
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
    if names.iter().any(|name| std::env::var_os(name).is_some()) {
        false
    } else {
        keep()
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(
    unsafe_code,
    reason = "the C library's settings are set by a call of it"
)]
fn keep() -> bool {
    /// A threshold that exceeds the size of most CPU tensors and fits in a C `int`.
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
