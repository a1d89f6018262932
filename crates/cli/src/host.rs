//! What the operating system says about memory.

use std::fs;

/// Memory of the machine, where the system tells.
pub(crate) fn memory_bytes() -> Option<u64> {
    field("/proc/meminfo", "MemTotal:")
}

/// The most memory that this process has had resident, where the system tells.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// A line such as `VmHWM:  1234 kB` of a file, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
