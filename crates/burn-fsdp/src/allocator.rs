//! The allocator of the host: whether memory that tensors free stays with the process.
//!
//! On the CPU a step allocates and frees the same tensors as the step before. The allocator of glibc hands large ones
//! back to the system each time, and then every page of the next tensor is a fault: a tenth of a step and more.

/// Asks the C library to keep the memory that this process frees, for what it allocates next. Returns true if it does
/// so from now on; false where it has no such setting, as everywhere but with glibc on Linux. Programs that bring an
/// allocator of their own (`#[global_allocator]`) do not need it.
///
/// Blocks above 64 MiB go back all the same where a thread other than the main one allocates them.
///
/// It is for programs that train on the CPU, before they allocate much; the command does it. The process then holds
/// what its largest moment took, and somewhat more: the gaps between tensors.
///
/// What the user has set by the variables `MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `MALLOC_TOP_PAD_` or
/// `GLIBC_TUNABLES` is left alone.
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
    /// More than most tensors of a step on a host, and what fits the C library's int.
    const MOST: i32 = 1 << 30;
    /// The most that every version of glibc takes as the size from which a tensor is mapped by itself.
    const MOST_OF_OLD: i32 = 32 << 20;
    /// Bytes by which the heap grows at once.
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
